"""`nestmodel features` by several processes, as torchrun, srun and `--devices` start them, one of which is killed."""

import json
from pathlib import Path

import pytest

from tests.cli.dying_rank import NUM_BATCHES
from tests.cli.features_runs import (
    DYING,
    NESTMODEL,
    SCRIPTS,
    contents,
    ended,
    features,
    start,
    with_features_of_one_rank,
)

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_features_of_one_rank(tmp_path_factory.mktemp("ranks"))


def finished(partial: Path) -> dict[str, int]:
    """Returns the feature files of the batches that were finished without a reject, and when they were written."""
    lines = [line for path in (partial / "batches").glob("*.jsonl") for line in path.read_text().splitlines()]
    files = [row["file"] for _, rows, _, _, rejected in map(json.loads, lines) if not rejected for row in rows]
    return {file: (partial / file).stat().st_mtime_ns for file in files}


def check_that_it_goes_on(killed: Path, resumed: Path, one: Path, before: dict[str, int]) -> None:
    """Checks that a resumed run equals that of one rank, and has not computed again what was finished."""
    assert contents(resumed) == contents(one)
    assert not killed.exists()
    assert {file: (resumed / file).stat().st_mtime_ns for file in before} == before


def test_after_the_death_of_a_rank_of_torchrun_more_ranks_go_on_and_equal_one(directory: Path) -> None:
    torchrun = [str(SCRIPTS / "torchrun"), "--nproc-per-node", "2", "--master-port", "0", "-m"]
    killed = ended(start([*torchrun, "tests.cli.dying_rank", *features("a")], directory))
    assert killed.code != 0
    assert "(local_rank: 1)" in killed.err
    assert "Signal 9 (SIGKILL)" in killed.err
    assert not (directory / "a").exists()
    before = finished(directory / "a.partial")
    assert len(before) >= NUM_BATCHES
    resumed = ended(start([*NESTMODEL, *features("a"), "--devices", "3"], directory))
    assert resumed.code == 0, resumed.err
    assert resumed.out.startswith(f"{directory / 'a'}: 19 utterances")
    assert resumed.out.count("index: ") == 1
    check_that_it_goes_on(directory / "a.partial", directory / "a", directory / "one", before)


def test_a_killed_rank_of_devices_is_named_and_fewer_ranks_go_on(directory: Path) -> None:
    killed = ended(start([*DYING, *features("b"), "--devices", "3"], directory))
    (line,) = killed.error_lines
    assert killed.code == 1
    assert line.startswith("error: rank 1 of 3 was killed by SIGKILL, and the others were ended.")
    before = finished(directory / "b.partial")
    assert len(before) >= NUM_BATCHES
    assert ended(start(NESTMODEL + features("b"), directory)).code == 0
    check_that_it_goes_on(directory / "b.partial", directory / "b", directory / "one", before)


def test_processes_of_srun_equal_one(directory: Path) -> None:
    variables = {"JOB_ID": "7", "STEP_ID": "0", "NTASKS": "2", "NNODES": "1", "JOB_NAME": "features"}
    tasks = [
        start(
            NESTMODEL + features("c"),
            directory,
            **{f"SLURM_{name}": value for name, value in variables.items()},
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
        )
        for rank in range(2)
    ]
    outcomes = [ended(task) for task in tasks]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert contents(directory / "c") == contents(directory / "one")


def test_a_mistake_that_all_ranks_make_is_one_line(directory: Path) -> None:
    mistaken = ended(start([*NESTMODEL, *features("d"), "--devices", "2", "--layers", "9"], directory))
    assert mistaken.code == 2
    assert mistaken.err.splitlines() == mistaken.error_lines
    assert len(mistaken.error_lines) == 1
    assert not (directory / "d.partial").exists()
