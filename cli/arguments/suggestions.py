"""The nearest setting for a name that does not exist, among options and keys, by the last part as well as the whole."""

import difflib
from collections.abc import Iterable

from .keys import key_groups, keys
from .settings import accepted_by

OTHER_NAMES = {
    "batch-duration": "max-batch-seconds",
    "batch-size": "max-batch-seconds",
    "checkpoint": "ckpt-path",
    "dataset": "CORPUS",
    "epochs": "max-steps",
    "eval-interval": "val-check-interval",
    "grad-accum": "microbatches-per-step",
    "gpus": "devices",
    "learning-rate": "lr",
    "logger": "log",
    "model": "config",
    "nnodes": "num-nodes",
    "output-dir": "output",
    "preset": "config",
    "resume-from": "ckpt-path",
    "steps": "max-steps",
    "train-data": "CORPUS",
    "val-data": "val-corpus",
    "warmup": "warmup-steps",
    "workers": "num-workers",
}
"""Names that other tools give to our options. A test looks up each."""

_CUTOFF = 0.6


def option_hint(name: str, command: str) -> str:
    """Returns the text to append to a message about an unknown option; empty when no known one is similar.

    Args:
        name: The option as it was typed, with dashes in front.
        command: One of `fit`, `validate` and `preflight`.
    """
    typed = name.lstrip("-").replace("_", "-")
    flags = {setting.option: setting.flag for setting in accepted_by(command)}
    if (other := OTHER_NAMES.get(typed)) in flags:
        return f"; here it is {flags[other]}"
    if "." in typed:
        near = nearest_key(typed)
        return f"; the nearest is '{near}'" if near else ""
    by_last_part = {_normal(key.rpartition(".")[2]): f"--{key}" for key in reversed(keys())}
    candidates = {**by_last_part, **{_normal(option): flag for option, flag in flags.items()}}
    matches = difflib.get_close_matches(_normal(typed), candidates, n=1, cutoff=_CUTOFF)
    return f"; the nearest is {candidates[matches[0]]}" if matches else ""


def nearest_key(name: str, known: Iterable[str] = ()) -> str:
    """Returns the known key that is the most similar to a dotted one, or an empty string.

    Args:
        name: The key as it was written.
        known: The keys that exist; by default, those of a run.
    """
    known = sorted(known) or [*keys(), *key_groups()]
    whole = _normal(name)

    def similarity(key: str) -> float:
        as_whole = difflib.SequenceMatcher(None, whole, _normal(key)).ratio()
        parts = difflib.SequenceMatcher(None, whole.rpartition(".")[2], _normal(key).rpartition(".")[2]).ratio()
        # A part in another section counts less, and decides only if nothing similar is in this one.
        return max(as_whole, 0.6 * parts + 0.4 * as_whole)

    nearest = max(known, key=similarity, default="")
    return nearest if nearest and similarity(nearest) >= _CUTOFF else ""


def _normal(name: str) -> str:
    return name.replace("-", "_").lower()
