"""The HTML report of a corpus: durations, samples, hours by language and speaker, rejects, padding of batch plans.

The charts are bars drawn with HTML and CSS, so that the page is written in milliseconds and needs no other file but
the audio of the samples.
"""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nestdata.errors import PlanError, in_one_line, shortened
from nestdata.output import is_full_disk
from nestdata.pages import write_page
from nestdata.plan.batch_plan import BatchPlan
from nestdata.plan.config import PlanConfig
from nestdata.plan.lengths import Lengths
from nestdata.plan.summary import summarise_plan
from nestdata.prepare.reporting.advice import ADVICE
from nestdata.prepare.reporting.listening import MAX_BYTES, MAX_TEXT, Listening
from nestdata.prepare.reporting.sound import MAX_SECONDS
from nestdata.prepare.reporting.speech_report import speech_charts

_log = logging.getLogger(__name__)
_NUM_BINS = 48
_NUM_TICKS = 7
_MAX_NAMES = 200
_BUDGETS_S = (60.0, 120.0, 240.0, 480.0)
_MICROBATCHES = 8


@dataclass(frozen=True, slots=True)
class _Bar:
    name: str
    value: float
    share: float
    """The value divided by that of the longest bar."""


def write_report(
    directory: Path,
    name: str,
    meta: dict[str, Any],
    hours_by: dict[str, dict[str, float]],
    listening: Listening | None,
    notes: Sequence[str] = (),
) -> None:
    """Writes `report.html` into a corpus directory.

    If anything goes wrong, the page only says so: the corpus does not need it.

    Args:
        directory: The directory, which holds `index.npy` and `rejected.jsonl`.
        name: Name of the corpus.
        meta: The content of `meta.json`, which may be written later.
        hours_by: Hours by name for each kind of label, descending, such as `{"language": {"en": 3.5}}`.
        listening: Samples to listen to; None for a page without them.
        notes: Lines about the corpus.

    Raises:
        OSError: The disk is full.
    """
    try:
        _write_charts(directory, name, meta, hours_by, listening, notes)
    except Exception as error:
        if isinstance(error, OSError) and is_full_disk(error):
            raise
        failure = f"{name}: the report cannot be written ({in_one_line(error)}). The corpus is complete."
        _log.warning("%s", failure)
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Report</title><p>{escape(failure)}</p></html>'
        )
        (directory / "report.html").write_text(page, encoding="utf-8", errors="backslashreplace")


def _write_charts(
    directory: Path,
    name: str,
    meta: dict[str, Any],
    hours_by: dict[str, dict[str, float]],
    listening: Listening | None,
    notes: Sequence[str] = (),
) -> None:
    """Does the work of `write_report`."""
    lengths, _ = np.asarray(np.load(directory / "index.npy", mmap_mode="r"))
    rate = meta["sampling_rate"]
    write_page(
        directory / "report.html",
        "report.html",
        name=name,
        meta=meta,
        seconds=(int(lengths[0]) / rate, int(lengths[-1]) / rate),
        durations=_durations(lengths, rate),
        ticks=[f"{tick:.2g} s" for tick in np.geomspace(int(lengths[0]), int(lengths[-1]), _NUM_TICKS) / rate],
        labels={kind: _bars(list(hours.items())[:_MAX_NAMES]) for kind, hours in hours_by.items() if hours},
        num_more={kind: max(0, len(hours) - _MAX_NAMES) for kind, hours in hours_by.items()},
        rejects=_bars((reason, float(number)) for reason, number in meta["rejected"].items()),
        examples=_examples(directory / "rejected.jsonl", set(meta["rejected"])),
        advice=ADVICE,
        speech_charts=speech_charts(directory, meta),
        plans=[_plan(lengths, rate, budget) for budget in _BUDGETS_S],
        microbatches=_MICROBATCHES,
        listening=listening,
        notes=notes,
        max_seconds=MAX_SECONDS,
        max_bytes=MAX_BYTES,
        inf=math.inf,
    )


def _bars(values: Iterable[tuple[str, float]]) -> list[_Bar]:
    values = list(values)
    longest = max((value for _, value in values), default=0.0) or 1.0
    return [_Bar(shortened(name, MAX_TEXT), value, value / longest) for name, value in values]


def _durations(lengths: Lengths, rate: int) -> list[_Bar]:
    """Returns hours of audio by length of the cut, in bins of equal width on a logarithmic scale."""
    shortest, longest = int(lengths[0]), int(lengths[-1])
    edges = np.geomspace(shortest, longest + 1, _NUM_BINS + 1)
    edges = np.unique(np.ceil(edges - 1e-6).astype(np.int64))
    # The lengths are sorted, so a bin is a slice.
    bounds = np.searchsorted(lengths, edges, "left").tolist()
    hours = [float(lengths[first:stop].sum()) / rate / 3600 for first, stop in pairwise(bounds)]
    names = [f"{low / rate:.3g} to {high / rate:.3g} s" for low, high in pairwise(edges.tolist())]
    return _bars(zip(names, hours, strict=True))


def _examples(path: Path, reasons: set[str]) -> dict[str, dict[str, Any]]:
    """Returns the first reject for each reason."""
    examples: dict[str, dict[str, Any]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            examples.setdefault(row["reason"], row)
            if len(examples) == len(reasons):
                break
    return examples


def _plan(lengths: Lengths, rate: int, budget_s: float) -> dict[str, Any]:
    config = PlanConfig(max_batch_seconds=budget_s, microbatches_per_step=_MICROBATCHES)
    try:
        plan = BatchPlan(lengths, rate, config, content="report")
    except PlanError as error:
        return {"seconds": budget_s, "error": str(error)}
    return {"seconds": budget_s, "summary": summarise_plan(plan, [lengths])}
