"""Runs whose ranks launch kernels on a device that runs beside them: a stand-in or, in tests marked `gpu`, a real GPU.

The host of every rank launches the whole step and then waits for the device, in the phase COLLECTIVE.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from nestguard import EXIT_STALLED
from tests.nestguard.runs import Run, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]


def processes(started: Run) -> dict[int, dict[str, Any]]:
    started.wait_for_end_of(started.pid("monitor-0"))
    return {process["rank"]: process for process in started.report()["processes"]}


@pytest.mark.parametrize("phase", ["BACKWARD", "COLLECTIVE"])
def test_the_rank_whose_device_hangs_is_named_although_all_hosts_wait_in_the_collective(
    tmp_path: Path, phase: str
) -> None:
    traces = {rank: {"entries": [{"collective_seq_id": 31 + rank}]} for rank in (0, 1)}
    with run(tmp_path, fault=phase, faulty_rank=1, device="stand-in", trace=traces) as started:
        assert started.exit_codes() == [EXIT_STALLED] * 2
        ranks = processes(started)
        assert [ranks[rank]["phase"] for rank in (0, 1)] == ["COLLECTIVE", "COLLECTIVE"]
        assert [ranks[rank]["diagnosis"] for rank in (0, 1)] == ["waiting", "stuck"]
        assert (ranks[1]["device"]["phase"], ranks[1]["device"]["step"]) == (phase, 2)
        assert f"stall guard: rank 1 is stuck in {phase}, step 2" in started.output
        if phase != "COLLECTIVE":
            reason = f"device in {phase} of step 2; host in COLLECTIVE for"
            assert ranks[1]["reason"].startswith(reason)
        assert ranks[0]["device"] == {"phase": "COLLECTIVE", "step": 3 if phase == "COLLECTIVE" else 2, "microbatch": 0}
        assert "hang_on_device" in started.stack("rank-1")
        # The ranks wrote the traces of their flight recorders before they were ended.
        (report,) = started.reports
        for rank, trace in traces.items():
            assert json.loads((report / f"rank-{rank}.flight-recorder.json").read_text()) == trace
        assert f"unfinished collectives: {report}/*.flight-recorder.json" in started.output


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["FORWARD", "BACKWARD"])
def test_a_kernel_that_hangs_on_a_gpu_is_named(tmp_path: Path, phase: str) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    limits = {"step_s": 10.0, "first_step_s": 60.0}
    with run(tmp_path, fault=phase, faulty_rank=1, device="cuda", limits=limits) as started:
        assert started.exit_codes(150) == [EXIT_STALLED] * 2
        ranks = processes(started)
        assert [ranks[rank]["diagnosis"] for rank in (0, 1)] == ["waiting", "stuck"]
        assert ranks[1]["device"] == {"phase": phase, "step": 2, "microbatch": 0}
        assert ranks[1]["phase"] == "COLLECTIVE"
