import csv
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestmodel.training.metrics_file import MetricsFile


@pytest.fixture(autouse=True)
def _space() -> Iterator[None]:
    yield
    limit_files(resource.RLIM_INFINITY)


def limit_files(num_bytes: int) -> None:
    """Makes writing fail beyond a size of a file, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def read(path: Path) -> list[dict[str, str]]:
    """Returns the values of each line, without empty ones."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.filterwarnings("ignore:.*cannot be written")
def test_no_line_is_lost_or_torn_whenever_the_disk_is_full(tmp_path: Path) -> None:
    draw, metrics, expected = random.Random(0), MetricsFile(tmp_path), []
    path = metrics.claim() / "metrics.csv"
    for step in range(200):
        if step % 10 == 0:
            limit_files(draw.randrange(2000) if step % 20 else resource.RLIM_INFINITY)
        row = {"loss": draw.random(), **({"val_loss": 1.5} if step in (60, 110) else {})}
        metrics.log_metrics(row, step=step)
        metrics.save()
        expected.append({name: str(value) for name, value in {**row, "step": step}.items()})
        on_disk = read(path)
        assert on_disk == expected[: len(on_disk)]
    limit_files(resource.RLIM_INFINITY)
    metrics.finalize("success")
    assert read(path) == expected
    assert [each.name for each in path.parent.iterdir()] == ["metrics.csv"]


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.claim()
    limit_files(0)
    metrics.log_metrics({"loss": 1.0}, step=0)
    with pytest.warns(UserWarning, match=r"metrics\.csv: cannot be written \(File too large\)\. Training continues"):
        metrics.save()
    metrics.save()  # warnings are errors here
