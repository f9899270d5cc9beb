"""Errors of a character probe, read from the transcripts that `nestmodel probe characters` writes."""

from functools import reduce
from operator import add
from pathlib import Path

from benchmarks.learning.parts.manifests import read_lines
from nestmodel import ErrorCounts, count_errors


def read_errors(path: Path, features: str = "trained") -> ErrorCounts:
    """Returns the errors in characters of a probe, added up over the seeds of its heads and over groups of lines.

    Args:
        path: The file `hypotheses.jsonl` of the probe.
        features: Which features the head reads: `trained`, `untrained` or `log_mel`.
    """
    lines = sorted(read_lines(path), key=lambda line: str(line["id"]))
    texts = [line["text"] for line in lines]
    counts = (count_errors(texts, [one[features][seed] for one in lines], "characters") for seed in lines[0][features])
    return reduce(add, counts).by_group([line["group"] for line in lines])
