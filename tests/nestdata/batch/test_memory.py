import gc
import os

import numpy as np
import pytest
import torch

from nestdata.batch.memory import SlotRing, batch_arrays, bytes_of_batch

FIELDS = ["audio", "noise", "noisy_audio", "audio_len", "noise_len", "noisy_audio_len"]


def test_arrays_lie_one_after_the_other_in_the_slot_at_cache_lines() -> None:
    num_bytes = bytes_of_batch(3, 5)
    slot = np.full(num_bytes, 255, np.uint8)
    arrays = batch_arrays(3, 5, slot)
    assert list(arrays) == FIELDS
    starts = {name: array.ctypes.data - slot.ctypes.data for name, array in arrays.items()}
    assert list(starts.values()) == [0, 64, 128, 192, 256, 320]
    assert num_bytes == 6 * 64
    assert not slot[64 : 64 + 60].any()
    assert (np.delete(slot, np.r_[64:124]) == 255).all()
    assert {array.dtype for name, array in arrays.items() if name.endswith("_len")} == {np.dtype(np.int64)}


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


def test_a_ring_closes_its_file() -> None:
    ring = SlotRing(1, 4096)
    file = ring._file
    assert os.fstat(file).st_size == 4096
    del ring
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
