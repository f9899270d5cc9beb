import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nestmodel.training.callbacks.stall_guard import CudaEvent, read_collectives
from nestmodel.training.pace import mark_end_of_backward
from tests.nestguard.runs import wait_until


@pytest.mark.usefixtures("gloo")
def test_the_end_of_the_backward_pass_comes_before_ddp_waits_for_other_ranks() -> None:
    def doubled_elsewhere(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, doubled_elsewhere)
    weight = model.module.weight
    seen: list[float] = []
    loss = model(torch.full((1, 1), 3.0)).sum()
    mark_end_of_backward(loss, lambda: seen.append(weight.grad.item()))
    loss.backward()
    assert seen == [3.0]  # DDP has not yet replaced it by the result of the other ranks
    assert weight.grad.item() == 6.0


@pytest.mark.usefixtures("gloo")
@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="gloo has a recorder since PyTorch 2.8"
)
def test_the_flight_recorder_is_on_by_default_and_its_trace_can_be_read() -> None:
    def completed() -> list[int]:
        # The trace keeps the process groups of earlier tests.
        groups: dict[str, dict[str, Any]] = json.loads(read_collectives())["pg_status"]
        return [int(group["last_completed_collective"]) for group in groups.values()]

    number = 3 + max(completed(), default=0)
    for _ in range(number):
        torch.distributed.all_reduce(torch.ones(2))
    # A thread of gloo records the end of a collective, after the collective has returned.
    wait_until(lambda: number in completed(), seconds=30)


@pytest.mark.gpu
def test_an_event_on_a_gpu_is_done_when_the_kernels_before_it_are() -> None:
    event = CudaEvent()
    torch.cuda._sleep(1_000_000_000)
    event.record()
    assert not event.is_done()
    torch.cuda.synchronize()
    assert event.is_done()


@pytest.mark.gpu
def test_the_flight_recorder_of_nccl_is_on_by_default_and_its_trace_can_be_read(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.distributed.all_reduce(torch.ones(2, device="cuda"))
        torch.cuda._sleep(2_000_000_000)
        torch.distributed.all_reduce(torch.ones(2, device="cuda"))
        trace = json.loads(read_collectives())
        torch.cuda.synchronize()
    finally:
        torch.distributed.destroy_process_group()
    (entry,) = [entry for entry in trace["entries"] if not entry["is_p2p"]]
    assert (entry["collective_seq_id"], entry["profiling_name"]) == (2, "nccl:all_reduce")
