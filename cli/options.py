"""Arguments and options that several commands take, so that one name means the same everywhere."""

from pathlib import Path
from typing import Annotated

from .parsing import Positionals, Repeatable, option

ModelArgument = Annotated[
    Path,
    Positionals,
    option(metavar="MODEL", help="A checkpoint from `nestmodel fit`, a .nemo file or a safetensors file."),
]
InputArguments = Annotated[
    tuple[str, ...],
    Positionals,
    option(
        metavar="INPUT",
        help="Any input of `nestdata prepare`: audio files, folders of audio, CSV tables, lists of paths, manifests, "
        "data sets, corpora, or URLs of them.",
    ),
]
CorpusArguments = Annotated[
    tuple[Path, ...],
    Positionals,
    option(metavar="CORPUS", help="Speech corpora from `nestdata prepare`; by default data.corpus."),
]

AsJson = Annotated[bool, option(name="json", help="Print the result as JSON.")]
Overwrite = Annotated[bool, option(help="Replace existing output, once the new one is complete.")]
AttentionContext = Annotated[
    str | None,
    option(
        metavar="LEFT,RIGHT",
        help="Attention context in encoder frames, of an encoder that was trained with several; by default the first.",
    ),
]
ConfigNames = Annotated[
    tuple[str, ...],
    Repeatable,
    option(
        "-c", metavar="NAME", help="Preset, such as small, or YAML file; later ones replace values of earlier ones."
    ),
]
RunSeed = Annotated[int, option(help="Seed of the run.")]
WorldSize = Annotated[int, option(help="Number of ranks that share an optimizer step.")]


def chosen_context(text: str | None) -> tuple[int, int] | None:
    """Returns the context that was given as text; None without one.

    Raises:
        ConfigError: The text is not a context.
    """
    from nestmodel import parse_context

    return None if text is None else parse_context(text)
