import csv
import random
from pathlib import Path

import pytest

from nestmodel.training.metrics_file import MetricsFile
from tests.nestdata.full_disk import files_up_to


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
            limit = draw.randrange(2000) if step % 20 else 1 << 30
        row = {"loss": draw.random(), **({"val_loss": 1.5} if step in (60, 110) else {})}
        metrics.log_metrics(row, step=step)
        with files_up_to(limit):
            metrics.save()
        expected.append({name: str(value) for name, value in {**row, "step": step}.items()})
        on_disk = read(path)
        assert on_disk == expected[: len(on_disk)]
    metrics.finalize("success")
    assert read(path) == expected
    assert [each.name for each in path.parent.iterdir()] == ["metrics.csv"]


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.claim()
    metrics.log_metrics({"loss": 1.0}, step=0)
    with files_up_to(0):
        with pytest.warns(
            UserWarning, match=r"metrics\.csv: cannot be written \(File too large\)\. Training continues"
        ):
            metrics.save()
        metrics.save()  # warnings are errors here
