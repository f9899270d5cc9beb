"""Batches that are copied ahead: their order by streams that note what they are told, and their values on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nestmodel.preflight.trial import noise_batch
from nestmodel.training.copy_ahead import CopyAhead

GPU = torch.device("cuda")


class NotedStream:
    """Notes what it waits for, by the number of operations that were given to each stream before."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: "NotedStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return self.log[-1]


def test_each_batch_is_copied_before_the_one_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    streams = [NotedStream(log, "compute")]

    @contextmanager
    def stream(chosen: NotedStream) -> Iterator[None]:
        streams.append(chosen)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: NotedStream(log, "copies"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: streams[-1])
    monkeypatch.setattr(torch.cuda, "Event", str)

    def copy(batch: Any) -> Any:
        log.append(f"{streams[-1].name}: copy {batch.key.microbatch}")
        return batch

    batches = [noise_batch((1, 100 + number)) for number in range(3)]
    for number, batch in enumerate(batches):
        object.__setattr__(batch, "key", batch.key._replace(microbatch=number))
    ahead = CopyAhead(batches, copy, GPU)
    assert len(ahead) == 3
    for batch in ahead:
        log.append(f"{streams[-1].name}: batch {batch.key.microbatch}")
    assert log == [
        *("copies waits for compute", "copies: copy 0"),
        *("copies waits for compute", "copies: copy 1"),
        *("compute waits for copies: copy 0", "compute: batch 0"),
        *("copies waits for compute", "copies: copy 2"),  # into the memory of batch 0
        *("compute waits for copies: copy 1", "compute: batch 1"),
        *("compute waits for copies: copy 2", "compute: batch 2"),
    ]


@pytest.mark.gpu
def test_a_gpu_computes_while_the_next_batch_is_copied_and_reads_the_right_one() -> None:
    batches = [noise_batch((4, 160_000 + 16 * number)).pin_memory() for number in range(6)]
    copies: list[torch.cuda.Event] = []

    def copy(batch: Any) -> Any:
        copied = batch.to(GPU, non_blocking=True)
        copies.append(torch.cuda.current_stream().record_event())
        return copied

    found = []
    for number, batch in enumerate(CopyAhead(batches, copy, GPU)):
        torch.cuda._sleep(200_000_000)
        found.append(batch.audio.clone())
        computed = torch.cuda.current_stream().record_event()
        del batch
        if number == 0:  # later copies wait until the memory is free
            copies[1].synchronize()
            assert not computed.query()
    assert len(found) == len(batches)
    assert all(torch.equal(one.cpu(), batch.audio) for one, batch in zip(found, batches, strict=True))
