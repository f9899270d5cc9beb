"""`nestdata prepare`: writes one corpus directory from one or more inputs."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Literal

from nestdata import ConfigError, PrepareConfig, SegmentConfig
from nestdata.input_format import FORMATS

from ..options import AsJson, Overwrite
from ..output import console, print_json, rejected_text
from ..parsing import Positionals, Unprefixed, option
from ..progress import progress

if TYPE_CHECKING:
    from nestdata import PrepareProgress

_SEGMENT = SegmentConfig()
# Before this, a rate would be a guess.
_MINUTES_BEFORE_RATE = 1 / 60


def prepare_command(
    inputs: Annotated[
        tuple[str, ...],
        Positionals,
        option(
            metavar="INPUT",
            help=f"Any of these, in any combination: {', '.join(form.title for form in reversed(FORMATS.values()))}. "
            "All except the local ones may be URLs, such as s3://bucket/speech.",
        ),
    ],
    *,
    output: Annotated[
        str | None,
        option(
            "-o",
            help="Corpus directory to write, a local path; by default NAME.corpus for an input NAME.json or "
            "NAME_{0..7}.tar.",
        ),
    ] = None,
    config: Annotated[PrepareConfig, Unprefixed] = PrepareConfig(),
    segment: Annotated[
        Literal["vad"] | None,
        option(help="Cut recordings at pauses, and leave out what is not speech (needs the extra `vad`)."),
    ] = None,
    min_segment_seconds: Annotated[
        float | None,
        option(
            help="With --segment: join speech across pauses until a cut has this many seconds. Speech without a near "
            f"neighbour stays shorter; --min-seconds rejects it. By default {_SEGMENT.min_seconds:g}.",
        ),
    ] = None,
    max_segment_seconds: Annotated[
        float | None, option(help=f"With --segment: longest cut in seconds; by default {_SEGMENT.max_seconds:g}.")
    ] = None,
    max_pause: Annotated[
        float | None,
        option(help=f"With --segment: longest pause inside a cut, in seconds; by default {_SEGMENT.max_pause:g}."),
    ] = None,
    jobs: Annotated[int, option("-j", help="Number of processes that check audio.")] = 1,
    dask: Annotated[
        str | None,
        option(metavar="ADDRESS", help="Check audio on a Dask cluster, given the address of its scheduler."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Prepare one corpus from one or more inputs."""
    from nestdata import default_output, prepare_corpus

    if output is None:
        if len(inputs) > 1:
            raise ConfigError("several inputs need a name for the corpus: give one with --output NAME.corpus.")
        output = str(default_output(inputs[0]))
    config = replace(config, segment=_segment(segment, min_segment_seconds, max_segment_seconds, max_pause))
    describe = _describer()
    with progress("checking audio", repeats=True) as show:
        report = prepare_corpus(
            inputs,
            output,
            config,
            overwrite=overwrite,
            jobs=jobs,
            dask=dask,
            on_progress=lambda found: show(*describe(found)),
        )
    if as_json:
        return print_json(asdict(report))
    out = console()
    out.print(
        f"{report.path}: {report.num_cuts} cuts, {report.hours:.2f} h, "
        f"{report.shortest_s:.2f} to {report.longest_s:.2f} s"
    )
    for note in report.notes:
        out.print(f"  {note}")
    if report.num_resampled:
        out.print(f"  resampled when read: {report.num_resampled}")
    if report.rejected:
        out.print(f"  {rejected_text(report.rejected, report.path)}")
    out.print(f"  report: {report.path / 'report.html'}")


def _segment(
    method: str | None, min_seconds: float | None, max_seconds: float | None, max_pause: float | None
) -> SegmentConfig | None:
    """Returns how recordings are cut at pauses; options that are not given keep their defaults."""
    options = {"min_seconds": min_seconds, "max_seconds": max_seconds, "max_pause": max_pause}
    given = {name: value for name, value in options.items() if value is not None}
    if method is None and given:
        raise ConfigError(
            "--min-segment-seconds, --max-segment-seconds and --max-pause need --segment vad; without it, recordings "
            "are not cut at pauses."
        )
    return None if method is None else SegmentConfig(**given)


def _describer(
    clock: Callable[[], float] = time.monotonic,
) -> Callable[["PrepareProgress"], tuple[int, int | None, str]]:
    """Returns a function of what progress shows: a number, its total, and a note that begins with their unit."""
    start = clock()

    def describe(found: "PrepareProgress") -> tuple[int, int | None, str]:
        minutes = (clock() - start) / 60
        notes = [f"{found.hours:,.1f} h"]
        if found.hours and minutes > _MINUTES_BEFORE_RATE:
            notes.append(f"{found.hours / minutes:,.3g} h/min")
        if found.bytes_read:
            notes.append(f"{found.bytes_read / 1e9:.2f} GB read")
        if found.total_shards:
            return found.shards, found.total_shards, ", ".join(["shards", f"{found.entries:,} entries", *notes])
        return found.entries, found.total_entries, ", ".join(["entries", *notes])

    return describe
