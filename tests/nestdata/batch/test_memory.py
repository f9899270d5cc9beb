import gc
import os

import pytest
import torch

from nestdata.batch.batch import SlotRing


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
