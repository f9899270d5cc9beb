import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from nestmodel import newest_checkpoint
from tests.conftest import MessyCorpora
from tests.distributed.runs import Run, comparable

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.faults]

STEPS = 6  # one more than an epoch has


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.smoke), (4, 0)])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    messy_corpora: MessyCorpora, tmp_path: Path, world_size: int, num_workers: int
) -> None:
    sizes: dict[str, Any] = {"world_size": world_size, "num_workers": num_workers, "max_steps": STEPS}
    plain = Run(corpora=messy_corpora, directory=tmp_path / "plain", **sizes)
    assert plain.start() == [0] * world_size, plain.log(0)
    killed = Run(corpora=messy_corpora, directory=tmp_path / "killed", **sizes)
    # The last rank is killed in its last microbatch of a step, that is, after gradients were accumulated.
    codes = killed.start(faults={world_size - 1: ("kill", 2, 3)})
    assert codes[-1] == -signal.SIGKILL, killed.log(world_size - 1)
    assert killed.steps()[0].step <= 2
    assert killed.start() == [0] * world_size, killed.log(0)
    assert killed.seen() == plain.seen()
    assert killed.logged() == plain.logged()
    assert killed.state() == plain.state()


@pytest.mark.smoke
def test_a_run_that_torchrun_restarts_equals_an_uninterrupted_one(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"world_size": 2, "max_steps": STEPS, "limits": {"step_s": 20.0}}
    plain = Run(corpora=messy_corpora, directory=tmp_path / "plain", **sizes)
    assert plain.start() == [0, 0], plain.log(0)
    killed = Run(corpora=messy_corpora, directory=tmp_path / "killed", **sizes)
    codes, output = killed.start_by_torchrun({0: ("kill", 2, 0)})
    assert codes == [0], output
    assert "stall guard: rank 0 has died" in output, output
    assert killed.seen() == plain.seen()
    assert killed.state() == plain.state()


@pytest.mark.parametrize(
    ("fault", "world_size", "every_n_steps", "codes", "saved"),
    [
        (("kill while writing", 2, 0), 2, 1, [-signal.SIGKILL, 1], 2),
        (("full disk", 3, 0), 2, 1, [74, 74], 3),
        (("SIGTERM while writing", 1, 0), 1, 2, [75], 3),  # after the checkpoint of step 2 was complete
    ],
)
def test_a_run_resumes_exactly_from_the_last_whole_checkpoint_when_writing_one_is_disturbed(
    messy_corpora: MessyCorpora,
    tmp_path: Path,
    fault: tuple[str, int, int],
    world_size: int,
    every_n_steps: int,
    codes: list[int],
    saved: int,
) -> None:
    sizes: dict[str, Any] = {"max_steps": STEPS, "world_size": world_size}
    plain = Run(corpora=messy_corpora, directory=tmp_path / "plain", **sizes)
    assert plain.start() == [0] * world_size, plain.log(0)
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", every_n_steps=every_n_steps, **sizes)
    assert run.start(faults={0: fault}) == codes, run.log(0)
    assert [found.step for found in run.steps()][:2] == [saved, saved - 1]
    assert run.checkpoint()["global_step"] == saved
    assert newest_checkpoint(run.directory) == run.steps()[0].path
    assert (fault[0] == "full disk") == ("could not be written (File too large" in run.log(0))
    for left in (run.directory / "checkpoints").glob(".*.partial"):
        os.utime(left, (0, 0))  # as a file that nobody can be writing any more
    assert run.start() == [0] * world_size, run.log(0)
    assert run.state() == plain.state()
    assert not list((run.directory / "checkpoints").glob("*.partial"))


@pytest.mark.smoke
def test_a_run_resumes_with_another_number_of_ranks(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 1, "proportional_steps": True}
    plain = Run(corpora=messy_corpora, directory=tmp_path / "plain", max_steps=STEPS, world_size=2, **settings)
    assert plain.start() == [0, 0], plain.log(0)
    moved = Run(corpora=messy_corpora, directory=tmp_path / "moved", max_steps=STEPS, **settings)
    assert moved.start(faults={0: ("kill", 1, 2)}) == [-signal.SIGKILL]
    moved.max_steps = 3
    assert moved.start(world_size=4) == [0] * 4, moved.log(0)
    moved.max_steps = STEPS
    assert moved.start(world_size=2) == [0, 0], moved.log(0)
    assert moved.seen() == plain.seen()
    # Another number of ranks sums in a different order: in float32, rounding differs by about 1e-7 of the largest term.
    assert moved.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert list(plain.validations()) == [2, 4, 6]
    assert moved.validations() == pytest.approx(plain.validations(), rel=1e-5)
    assert moved.checkpoint()["epoch"] == plain.checkpoint()["epoch"] == 1
    ours, theirs = (run.checkpoint()["state_dict"] for run in (moved, plain))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("signalled", [pytest.param([1], marks=pytest.mark.smoke), [0, 1]])
def test_sigterm_to_any_rank_saves_one_checkpoint_and_exits_with_the_preemption_code(
    messy_corpora: MessyCorpora, tmp_path: Path, signalled: list[int]
) -> None:
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", max_steps=STEPS, world_size=2, every_n_steps=100)
    faults = {rank: ("SIGTERM" if rank else "SIGUSR1", 1, 2 * rank) for rank in signalled}
    assert run.start(faults=faults) == [75, 75], run.log(0) + run.log(1)
    assert [found.step for found in run.steps()] == [2]
    assert run.start() == [0, 0], run.log(0)
    assert [found.step for found in run.steps()] == [STEPS, 2]


def test_ranks_that_found_different_checkpoints_are_an_error(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", max_steps=2, world_size=2)
    assert run.start() == [0, 0], run.log(0)
    run.max_steps, run.blind_rank = 3, 1
    assert run.start() == [1, 1]
    assert "rank 0 would resume at step 2, but the steps of the ranks are 0 to 2" in run.log(0)
    assert "rank 1 would resume at step 0, but the steps of the ranks are 0 to 2" in run.log(1)


def test_sigterm_within_a_collective_does_not_deadlock(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", max_steps=STEPS, world_size=2, every_n_steps=100)
    faults = {0: ("SIGTERM in a collective", 1, 0), 1: ("late for a collective", 1, 0)}
    assert run.start(faults=faults) == [75, 75], run.log(0) + run.log(1)
    assert [found.step for found in run.steps()] == [3]  # the all-reduce of step 1 had started before the signal


def test_a_step_with_a_nonfinite_loss_on_one_rank_is_skipped_on_all(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", max_steps=3, world_size=2)
    assert run.start(faults={1: ("nan", 1, 3)}) == [0, 0], run.log(0) + run.log(1)
    checkpoints = [torch.load(found.path, weights_only=False) for found in reversed(run.steps())]
    before, after, end = (
        comparable([checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]]) for checkpoint in checkpoints
    )
    assert after == before
    assert end != after
    ids = run.seen()[1, 3]
    assert f"on rank 1 the loss is not finite (microbatch 3: {', '.join(ids)})" in run.log(1)
    assert "on rank 0 the gradients are not finite, although every loss here is" in run.log(0)


def test_a_time_limit_ends_all_ranks_after_the_same_whole_step(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    run = Run(corpora=messy_corpora, directory=tmp_path / "run", max_steps=10**6, world_size=2, max_minutes=0.05)
    assert run.start() == [0, 0], run.log(0) + run.log(1)
    last = run.steps()[0].step
    assert f"trainer.max_time has passed: step {last} was the last" in run.log(0)
    assert sorted(run.seen()) == [(step, microbatch) for step in range(last) for microbatch in range(4)]
