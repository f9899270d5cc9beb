import io
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestmodel.training.saving.state_copy import StateCopier


def saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def state_of_every_kind() -> dict[str, Any]:
    base = torch.arange(60, dtype=torch.float32)
    layer = nn.BatchNorm1d(3)
    layer(torch.randn(4, 3)).sum().backward()
    shared = {"count": 3}
    return {
        "module": layer.state_dict(),  # an OrderedDict with an attribute of its own
        "parameter": nn.Parameter(torch.ones(2, 3), requires_grad=False),
        "with gradient": layer.weight,
        "result": layer.weight * 2,
        "whole": base,
        "view": base[10:20],
        "transposed": base.view(6, 10).T,
        "again": base,
        "of a larger memory": torch.arange(100)[50:53],
        "empty": [torch.empty(0), torch.empty(0, 4)],
        "scalar": torch.tensor(7),
        "types": (torch.ones(3, dtype=torch.bfloat16), torch.tensor([True, False]), torch.ones(2, dtype=torch.cfloat)),
        "other": [torch.eye(3).to_sparse(), torch.empty(2, device="meta")],
        "numpy": np.arange(4),
        "nested": OrderedDict(first=[shared, shared], second={"lr": 0.1, "betas": (0.9, 0.98), "name": None}),
    }


def test_a_copy_is_saved_as_the_same_bytes() -> None:
    state = state_of_every_kind()
    copier = StateCopier()
    expected = saved(state)
    for _ in range(2):
        copied = copier.copy(state)
        copied.wait()
        assert saved(copied.state) == expected
    assert saved(state) == expected


def test_a_copy_does_not_change_with_the_original() -> None:
    state = state_of_every_kind()
    expected = saved(state)
    copied = StateCopier().copy(state)
    state["whole"].zero_()
    state["of a larger memory"].zero_()
    state["module"]["running_mean"].fill_(9)
    state["with gradient"].data.zero_()
    state["numpy"][:] = 0
    state["nested"]["first"][0]["count"] = 4
    state["nested"]["second"]["lr"] = 0.2
    assert saved(copied.state) == expected
    assert saved(state) != expected


def test_the_memory_of_a_copy_is_reused_where_sizes_are_equal() -> None:
    copier = StateCopier()
    first = copier.copy({"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(2)}).state
    second = copier.copy({"a": torch.zeros(3), "b": torch.zeros(6)}).state
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["b"].data_ptr() != first["b"].data_ptr()
    assert first["a"].tolist() == [0, 0, 0]
    assert first["b"].tolist() == [1] * 5
    assert second["b"].tolist() == [0] * 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_is_page_locked_and_precedes_later_changes() -> None:
    weights = torch.randn(1 << 24, device="cuda")
    expected, copier = weights.cpu(), StateCopier()
    pointers = set()
    for _ in range(2):
        copied = copier.copy({"weights": weights, "step": torch.tensor(3.0)})
        weights.zero_()  # queued behind the copy
        copied.wait()
        assert copied.state["weights"].is_pinned()
        assert torch.equal(copied.state["weights"], expected)
        pointers.add(copied.state["weights"].data_ptr())
        weights.copy_(expected)
    assert len(pointers) == 1
