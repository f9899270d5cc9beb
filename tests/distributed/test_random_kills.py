import random
import time
from pathlib import Path

import pytest

from nestmodel import newest_checkpoint
from tests.conftest import MessyCorpora
from tests.distributed.commands import fit_command, kill_all, start
from tests.distributed.runs import state_of
from tests.training import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.faults]

STEPS = 8
MAX_KILLS = 3


def command_of(
    corpora: MessyCorpora, directory: Path, world_size: int, *flags: str, encoder: str | None = None
) -> list[str]:
    """Returns the command of a run with checkpoints at every step; a step has six microbatches for any ranks."""
    model = TINY["model"]["config"]
    if encoder is not None:
        model = {**model, "encoder": {"class_path": f"tests.own_encoders.{encoder}"}}
    trainer = {"max_steps": STEPS, "log_every_n_steps": 1, "accelerator": "cpu"}
    data = {"plan": {"max_batch_seconds": 6.0, "microbatches_per_step": 6}, "num_workers": 1}
    command = fit_command(corpora, directory, world_size, *flags, trainer=trainer, data=data, model={"config": model})
    return [*command, "--checkpoints.every-n-steps", "1"]


@pytest.mark.parametrize(
    ("seed", "world_size", "encoder"),
    [(0, 1, None), (1, 2, None), (2, 3, None), (3, 1, "Convolutions"), (4, 2, "Convolutions"), (5, 2, "Waveform")],
)
def test_a_run_that_is_killed_at_random_times_equals_an_uninterrupted_one(
    messy_corpora: MessyCorpora, tmp_path: Path, seed: int, world_size: int, encoder: str | None
) -> None:
    chosen = random.Random(seed)
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    began = time.monotonic()
    run = start(command_of(messy_corpora, plain, world_size, encoder=encoder), plain)
    assert run.wait(timeout=600) == 0, (plain / "log").read_text()
    whole_s = time.monotonic() - began
    for number in range(MAX_KILLS + 1):
        # Without a checkpoint yet, a resume is a start.
        has_begun = newest_checkpoint(killed / "run") is not None
        flags = ["--resume"] if has_begun else []
        run = start(command_of(messy_corpora, killed, world_size, *flags, encoder=encoder), killed)
        try:
            if number == MAX_KILLS:
                assert run.wait(timeout=600) == 0, (killed / "log").read_text()
            else:
                time.sleep(chosen.uniform(0.4, 1.0) * whole_s)
        finally:
            kill_all(run, killed)
    left, expected = (newest_checkpoint(directory / "run") for directory in (killed, plain))
    assert left is not None
    assert expected is not None
    assert state_of(left) == state_of(expected)
