"""Arguments and options that several commands take, so that one name means the same everywhere.

Options of settings come from the table that `nestmodel fit` uses as well.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from .completion import complete_presets
from .settings import setting


def setting_option(option: str, default: str | None = None, **extra: Any) -> Any:
    """Returns the option of a setting that a configuration may also give.

    Args:
        option: Its name in the table of settings.
        default: Text of the default; by default, that of the table, after the configuration.
        **extra: Parameters of `typer.Option`.
    """
    row = setting(option)
    if default is None and row.default is not None:
        default = f"from the configuration, else {row.default_text}"
    names = [row.flag, *([f"-{row.letter}"] if row.letter else [])]
    metavar = None if row.kind == "switch" else row.metavar
    return typer.Option(*names, metavar=metavar, help=row.help + (f" [default: {default}]" if default else ""), **extra)


ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="A checkpoint from `nestmodel fit`, a .nemo file or a safetensors file."),
]
InputArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="Any input of `nestdata prepare`: audio files, folders of audio, CSV tables, lists of paths, manifests, "
        "data sets, corpora, or URLs of them.",
    ),
]
CorpusArguments = Annotated[
    list[Path] | None,
    typer.Argument(metavar="CORPUS", help="Speech corpora from `nestdata prepare`. [default: data.corpus]"),
]

AsJson = Annotated[bool, setting_option("json")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output, once the new one is complete.")]
AttentionContext = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="LEFT,RIGHT",
        help="Attention context in encoder frames, of an encoder that was trained with several. [default: the first]",
    ),
]
ConfigFiles = Annotated[list[str] | None, setting_option("config", autocompletion=complete_presets)]
WorldSize = Annotated[int, typer.Option(min=1, help="Number of ranks that share an optimizer step.")]
PlanSeed = Annotated[int | None, setting_option("seed", "seed_everything, else 0")]
MicrobatchesPerStep = Annotated[int | None, setting_option("microbatches-per-step")]
MicrobatchSeconds = Annotated[float | None, setting_option("max-batch-seconds")]


def chosen_context(text: str | None) -> tuple[int, int] | None:
    """Returns the context that was given as text; None without one.

    Raises:
        ConfigError: The text is not a context.
    """
    from nestmodel import parse_context

    return None if text is None else parse_context(text)
