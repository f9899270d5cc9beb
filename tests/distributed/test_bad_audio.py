from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MessyCorpora
from tests.distributed.runs import MICROBATCHES_PER_STEP, Run
from tests.synthesis import messy_noise, messy_speech

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.faults]

STEPS = 6


def test_unreadable_audio_is_replaced_equally_on_any_number_of_ranks(tmp_path: Path) -> None:
    corpora = MessyCorpora(messy_speech(tmp_path).path, messy_noise(tmp_path).path, Path(), Path())
    truncated, vanished, empty = (tmp_path / f"speech-{name}" for name in ("21.flac", "10.wav", "20.ogg"))
    truncated.write_bytes(truncated.read_bytes()[: truncated.stat().st_size // 2])
    vanished.unlink()
    empty.write_bytes(b"")
    settings: dict[str, Any] = {"corpora": corpora, "max_steps": STEPS, "proportional_steps": True}
    one = Run(directory=tmp_path / "one", **settings)
    assert one.start() == [0], one.log(0)
    two = Run(directory=tmp_path / "two", world_size=2, num_workers=2, **settings)
    assert two.start() == [0, 0], two.log(0) + two.log(1)
    all_microbatches = {(step, microbatch) for step in range(STEPS) for microbatch in range(MICROBATCHES_PER_STEP)}
    assert one.seen().keys() == two.seen().keys() == all_microbatches
    assert two.seen() == one.seen()
    assert two.replaced() == one.replaced()
    assert {reason for _, reason in two.replaced()} == {"changed", "missing"}
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)  # float32 sums in a different order
    log = two.log(0) + two.log(1)
    for reason in ("changed", "missing"):
        assert f"speech replaced, {reason}: cut" in log
