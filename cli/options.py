"""Arguments and options that several commands take, so that one name means the same everywhere.

Options carry the names of the configuration fields that they set, with dashes: `--max-batch-seconds` sets
`max_batch_seconds`.
"""

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="A checkpoint from `nestmodel fit`, a .nemo file or a safetensors file."),
]
InputArguments = Annotated[
    list[Path],
    typer.Argument(
        metavar="INPUT",
        help="Any input of `nestdata prepare`: audio files, folders of audio, CSV tables, lists of paths, manifests, "
        "data sets, corpora.",
    ),
]
CorpusArguments = Annotated[
    list[Path] | None,
    typer.Argument(metavar="CORPUS", help="Speech corpora from `nestdata prepare`. [default: data.corpus]"),
]

AllowCommands = Annotated[
    bool,
    typer.Option("--allow-commands", help="Run shell commands that a manifest or corpus contains instead of files."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output, once the new one is complete.")]
Device = Annotated[str, typer.Option(help="Device such as cpu or cuda:1; auto takes a GPU if there is one.")]
BatchSeconds = Annotated[float, typer.Option(help="Maximum audio per batch in seconds, padding included.")]

ConfigFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="YAML",
        help="Configuration of a run, as for `nestmodel fit`: a file or a preset such as demo. May be repeated.",
    ),
]
WorldSize = Annotated[int, typer.Option(min=1, help="Number of ranks that share an optimizer step.")]
PlanSeed = Annotated[
    int | None, typer.Option(help="Seed of the plan and of every random draw. [default: seed_everything, else 0]")
]
MicrobatchesPerStep = Annotated[
    int | None,
    typer.Option(help="Microbatches per optimizer step over all ranks. [default: from the configuration, else 8]"),
]
MicrobatchSeconds = Annotated[
    float | None,
    typer.Option(
        "--max-batch-seconds",
        help="Maximum audio per microbatch in seconds, padding included. [default: from the configuration, else 240]",
    ),
]
