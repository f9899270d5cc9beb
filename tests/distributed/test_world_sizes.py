import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nestdata import AudioNoiseDataset, microbatches, summarise_plan
from tests.batches import MICROBATCHES_PER_STEP, digest, full_dataset, messy_dataset
from tests.conftest import MessyCorpora

REPOSITORY = Path(__file__).parents[2]
Seen = list[dict[str, Any]]


def run_ranks(
    kind: str,
    corpora: MessyCorpora,
    world_size: int,
    num_workers: int,
    num_threads: int,
    num_steps: int,
    directory: Path,
) -> list[Seen]:
    """Runs every rank in its own process, and returns the digests of its batches in order."""
    outputs = [directory / f"rank-{rank}-of-{world_size}.json" for rank in range(world_size)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            paths = [corpora.speech, corpora.windows, corpora.banked]
            arguments = [kind, *paths, rank, world_size, num_workers, num_threads, num_steps, output]
            command = [sys.executable, "-m", "tests.distributed.rank", *map(str, arguments)]
            processes.append(subprocess.Popen(command, cwd=REPOSITORY))
        assert [process.wait(timeout=400) for process in processes] == [0] * world_size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(output.read_text()) for output in outputs]


def dataset_of(kind: str, corpora: MessyCorpora) -> AudioNoiseDataset:
    """Returns a dataset with fixed shapes and mixture stages (full), or with mixed steps and several layouts."""
    if kind == "full":
        return full_dataset(corpora.speech, corpora.windows, corpora.banked)
    dataset = messy_dataset(corpora.speech, corpora.banked)
    assert summarise_plan(dataset.plan, dataset.corpus.num_samples).num_mixed_steps > 1
    assert len(dataset.plan.layouts) > 1
    return dataset


@pytest.fixture(scope="module")
def expected(messy_corpora: MessyCorpora) -> dict[str, dict[tuple[int, int], dict[str, Any]]]:
    """Returns the digest of every microbatch, computed in this process in reverse order, for each kind of dataset."""
    found = {}
    for kind in ("full", "mixed"):
        dataset = dataset_of(kind, messy_corpora)
        indices = microbatches(dataset.plan, num_steps=dataset.plan.steps_per_epoch + 2)
        found[kind] = {index: digest(dataset[index]) for index in reversed(indices)}
    return found


# torchrun sets one thread per process if it starts several ranks, so the number of threads varies with the world size.
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "mixed"])
@pytest.mark.parametrize(
    ("world_size", "num_workers", "num_threads"),
    [(1, 0, 4), *(pytest.param(*sizes, marks=pytest.mark.faults) for sizes in ((2, 1, 2), (4, 0, 1)))],
)
def test_steps_are_equal_byte_for_byte_for_any_world_size(
    messy_corpora: MessyCorpora,
    expected: dict[str, dict[tuple[int, int], dict[str, Any]]],
    tmp_path: Path,
    kind: str,
    world_size: int,
    num_workers: int,
    num_threads: int,
) -> None:
    num_steps = 1 + max(step for step, _ in expected[kind])  # into a second epoch
    ranks = run_ranks(kind, messy_corpora, world_size, num_workers, num_threads, num_steps, tmp_path)
    share = MICROBATCHES_PER_STEP // world_size
    for rank, seen in enumerate(ranks):
        steps = [batch["step"] for batch in seen]
        assert steps == sorted([*range(num_steps)] * share)  # no rank waits for another
        assert {batch["microbatch"] for batch in seen} == set(range(rank * share, (rank + 1) * share))
    union = {(batch.pop("step"), batch.pop("microbatch")): batch for seen in ranks for batch in seen}
    assert len(union) == sum(map(len, ranks))
    assert union == expected[kind]
