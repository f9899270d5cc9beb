from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nestmodel.config import NestConfig
from nestmodel.nn.gpu import check, devices, subsampling
from tests.kernel_definitions import code_for_gpus

CPU = torch.device("cpu")


@pytest.mark.usefixtures("triton_cache")
def test_a_kernel_that_cannot_be_compiled_is_not_used() -> None:
    from nestmodel.nn.gpu import dropout_kernel as kernels

    def launch() -> bool:
        kernels.launch_drop(torch.ones(3), torch.zeros(2, dtype=torch.int32), 1, 1.0)  # Triton has no driver for a CPU
        return True

    with pytest.warns(UserWarning, match=r"Steps are slower, because Triton fails: .*C compiler and the headers"):
        assert not devices.has_kernel(launch, "Steps are slower")


def test_kernels_that_compute_other_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "is_right", lambda *_: False)
    with pytest.warns(UserWarning, match=r"Blocks of the encoder .* computes other numbers than torch"):
        assert not check.has_block_kernels(NestConfig.preset("large").conformer, torch.zeros(2, 40, 512))
    with pytest.warns(UserWarning, match=r"stages of the subsampling .* computes other numbers than torch"):
        assert not subsampling._has_kernels.__wrapped__(CPU, torch.float32, False)


def test_what_kernels_do_not_take_goes_to_operations_of_torch_without_a_warning() -> None:
    large = NestConfig.preset("large").conformer
    x = torch.zeros(1, 5, 512)
    assert check.has_block_kernels(large, x)  # without a GPU, nothing is tried
    assert not check.has_block_kernels(large, x.double())
    assert not check.has_block_kernels(replace(large, conv_kernel_size=31), x)
    assert not check.has_block_kernels(large, torch.zeros(1, 20000, 512))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_kernels_are_tried_with_gradients_whatever_the_first_pass_is_and_draw_nothing(mode: Callable[[], Any]) -> None:
    states = torch.get_rng_state()
    config = check.small_config(NestConfig.preset("large").conformer)
    with code_for_gpus(), mode():
        assert check.is_right(CPU, torch.float32, config)
        assert devices.is_right(partial(subsampling.run_subsampling, False), CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize(("error", "expected"), [(0.0, True), (0.019, True), (0.2, False), (float("nan"), False)])
def test_kernels_are_right_within_twice_the_error_of_torch(error: float, expected: bool) -> None:
    exact = torch.linspace(1, 2, 50, dtype=torch.float64)

    def compute(_device: torch.device, dtype: torch.dtype, with_kernels: bool) -> list[Tensor]:
        relative = 0.0 if dtype == torch.float64 else error if with_kernels else 0.01
        return [exact * (1 + relative), 1e-9 * exact]

    assert devices.is_right(compute, CPU, torch.float32) == expected
