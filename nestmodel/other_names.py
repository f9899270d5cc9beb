"""Names of settings in NeMo, Lightning, Hugging Face, fairseq, lhotse and ESPnet, and the names here.

Readers of settings, in YAML files and in options, ask this module about names that they do not know.
"""

from collections.abc import Collection
from functools import cache
from importlib.resources import files


def name_here(name: str, places: Collection[str]) -> list[str]:
    """Returns the settings here that stand for a setting of another tool.

    Args:
        name: Dotted name, as it was given in a file or as an option.
        places: Dotted names of the settings that exist.

    Returns:
        One dotted name, or up to three that share the name; empty if the name is not known.
    """
    name = name.strip("+~-").replace("-", "_").lower()
    ours = [own for own, others in names_elsewhere() if any(f".{name}".endswith(f".{other}") for other in others)]
    for wanted in (name, *ours, name.rpartition(".")[2]):
        found = [place for place in places if f".{place}".endswith(f".{wanted}")]
        if found:
            return [wanted] if wanted in found else found[:3]
    return []


@cache
def names_elsewhere() -> list[tuple[str, list[str]]]:
    """Returns each name here with its names in other tools; one of these may stand for several names here."""
    lines = files("nestmodel").joinpath("other_names.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(": ") for line in lines if not line.startswith("#"))
    return [(own, others.split()) for own, others in pairs]
