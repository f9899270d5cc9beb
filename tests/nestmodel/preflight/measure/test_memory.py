import resource
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from nestmodel.preflight.measure import memory
from nestmodel.preflight.measure.memory import PeakMemory, usable_bytes

Usage = namedtuple("Usage", "ru_maxrss")


@pytest.mark.parametrize(("platform", "expected"), [("linux", 1024 * 5000), ("darwin", 5000)])
def test_the_peak_without_proc_is_in_bytes_on_every_system(
    monkeypatch: pytest.MonkeyPatch, platform: str, expected: int
) -> None:
    peak = PeakMemory(torch.device("cpu"))
    monkeypatch.setattr(memory, "read_kib", lambda *_: 0)
    monkeypatch.setattr(resource, "getrusage", lambda _: Usage(5000))
    monkeypatch.setattr(sys, "platform", platform)
    assert peak.peak_bytes() == expected


def test_a_gpu_offers_what_is_free_and_what_torch_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5)
    assert usable_bytes(torch.device("cuda", 0)) == 75


def test_the_peak_of_a_gpu_includes_fragmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 6)
    assert PeakMemory(torch.device("cuda", 0)).peak_bytes() == 9


def test_a_peak_that_cannot_be_reset_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = PeakMemory(torch.device("cpu"))

    def fail(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "write_text", lambda *_: 1)
    assert peak.reset()
    monkeypatch.setattr(Path, "write_text", fail)
    assert not peak.reset()
