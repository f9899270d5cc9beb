import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from nestdata.batch.memory import BatchMemory, SlotRing


def test_arrays_lie_one_after_the_other_in_the_slot_at_cache_lines() -> None:
    slot = np.full(1024, 255, np.uint8)
    memory = BatchMemory(slot)
    first, second, third = memory.empty(3, np.int16), memory.zeros((2, 5), np.float32), memory.empty(0, np.int64)
    first[:] = [1, 2, 3]
    assert np.array_equal(slot[:6].view(np.int16), [1, 2, 3])
    assert not slot[64 : 64 + 40].any()
    assert (second.shape, second.dtype, second.ctypes.data - slot.ctypes.data) == ((2, 5), np.float32, 64)
    assert (slot[6:64] == 255).all()
    assert third.shape == (0,)


@pytest.mark.parametrize("allocate", ["empty", "zeros"])
def test_an_array_that_does_not_fit_into_the_slot_is_a_new_one(allocate: str) -> None:
    slot = np.full(256, 255, np.uint8)
    memory = BatchMemory(slot)
    exact, more = getattr(memory, allocate)(64, np.float32), getattr(memory, allocate)(1, np.uint8)
    exact[:], more[:] = 1.0, 7
    assert np.shares_memory(exact, slot)
    assert not np.shares_memory(more, slot)
    assert (slot.view(np.float32) == 1.0).all()


def test_without_a_slot_every_array_is_new() -> None:
    memory = BatchMemory()
    assert memory.empty((2, 3), np.int16).shape == (2, 3)
    assert not memory.zeros(1000, np.float32).any()


def test_every_slot_has_memory_of_its_own() -> None:
    ring = SlotRing(3, 5000)
    assert ring.slot_bytes == 8192
    assert ring.num_bytes == 3 * 8192
    slots = [ring.acquire() for _ in range(3)]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2]
    assert ring.acquire() is None
    for slot in range(3):
        ring.bytes_of(slot)[:] = slot + 1
    assert [set(ring.tensor(slot).tolist()) for slot in range(3)] == [{1}, {2}, {3}]


def test_a_slot_is_free_only_when_nothing_refers_to_its_memory() -> None:
    ring = SlotRing(1, 4096)
    slot = ring.acquire()
    assert slot == 0
    tensor = ring.tensor(slot)
    view = tensor[64:128].view(torch.float32)
    kept = [tensor, view, view.numpy()[3:], view.reshape(4, 4)[1].detach()]
    del tensor, view
    while kept:
        assert ring.num_free == 0
        assert ring.acquire() is None
        kept.pop(0)
    gc.collect()
    assert ring.acquire() == 0


def test_memory_outlives_its_ring() -> None:
    ring = SlotRing(1, 4096)
    tensor = ring.tensor(0)
    del ring
    gc.collect()
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * 4096


def test_a_ring_closes_its_file() -> None:
    ring = SlotRing(1, 4096)
    file = ring._file
    assert os.fstat(file).st_size == 4096
    del ring
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the memory map of a process from /proc")
def test_the_memory_has_no_name_that_could_be_left_behind() -> None:
    program = """
        from nestdata.batch.memory import SlotRing
        ring = SlotRing(2, 4096)
        print([line.split(maxsplit=5)[5] for line in open("/proc/self/maps") if "nestdata-batches" in line])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found == "['/memfd:nestdata-batches (deleted)\\n']\n"
