"""Output directory and progress of a probe, the same for all tasks."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nestdata import output_directory
from nestdata.output import has_json_kind
from nestmodel.evaluate.inputs import OnProgress

OnWork = Callable[[int], None]
"""Called with the number of units of work that were finished since the last call."""


@contextmanager
def probe_directory(target: Path | None, overwrite: bool) -> Iterator[Path]:
    """Yields the directory that becomes `target`, or a temporary directory if there is no target."""
    if target is None:
        with tempfile.TemporaryDirectory(prefix="nestmodel-probe-") as name:
            yield Path(name)
    else:
        with output_directory(target, kind="a probe", overwrite=overwrite, may_replace=_is_probe) as partial:
            yield partial


def progress_counter(total: int, on_progress: OnProgress | None) -> OnWork:
    """Returns a function that adds up finished units of work and reports their number and the total."""
    done = 0

    def on_work(number: int) -> None:
        nonlocal done
        done += number
        if on_progress:
            on_progress(done, total)

    return on_work


def _is_probe(directory: Path) -> bool:
    return has_json_kind(directory, "probe.json", "probe")
