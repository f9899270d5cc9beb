import pytest
import torch

from nestmodel.errors import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("Allocation on device 0 failed."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:84] DefaultCPUAllocator: not enough memory: you tried ..."),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_failed_allocations_are_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), ValueError("out of memory"), RuntimeError()])
def test_other_errors_are_not_taken_for_failed_allocations(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_error_of_an_allocation_that_no_machine_can_make_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
