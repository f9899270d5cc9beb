"""What a training step would run on a GPU, part by part, counted on tensors of a GPU that does not exist.

A change that adds an operation to a block, or bytes to a part, fails here. If it is meant, change the numbers.
`python -m benchmarks run count_step` prints all of them.
"""

from dataclasses import asdict
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.counts.count_step import (
    PARTS,
    Count,
    by_part,
    compile_block,
    compiled_features,
    count_demand,
    count_launches,
    step,
)
from benchmarks.counts.fake_gpu import OperationLog, Shape, backward, fake_gpu
from benchmarks.counts.step_launches import list_launches
from nestmodel import NestConfig, NestNetwork, loss_stats
from nestmodel.config import LIVE_PRESETS
from nestmodel.nn.gpu import devices
from nestmodel.preflight.trial import noise_batch
from tests.fakes import needs_fake_gpu
from tests.training import tiny_config

pytestmark = pytest.mark.slow

OUTSIDE = {
    "small": {
        "features": (38, 1.9),
        "quantizer": (18, 0.2),
        "subsampling": (69, 1.9),
        "head": (9, 0.2),
        "loss": (27, 0.4),
        "optimizer": (9, 0.15),
        "other": (28, 0.2),
    },
    "small+streaming": {
        "features": (25, 1.8),
        "quantizer": (18, 0.2),
        "subsampling": (73, 2.6),
        "head": (9, 0.2),
        "loss": (27, 0.4),
        "optimizer": (9, 0.15),
        "other": (61, 0.3),
    },
    "large": {
        "features": (38, 15.2),
        "quantizer": (20, 1.4),
        "subsampling": (132, 15.8),
        "head": (9, 0.7),
        "loss": (27, 2.9),
        "optimizer": (9, 0.6),
        "other": (28, 1.3),
    },
    "xlarge": {
        "features": (38, 6.1),
        "quantizer": (18, 0.6),
        "subsampling": (69, 6.4),
        "head": (9, 0.6),
        "loss": (27, 1.2),
        "optimizer": (9, 1.8),
        "other": (28, 0.8),
    },
}
"""Operations, and the most gigabytes, of the parts of a step besides its blocks; the optimizer has one block."""

A_BLOCK = {"small": (124, 0.6), "small+streaming": (128, 0.61), "large": (117, 12.6), "xlarge": (109, 9.6)}
"""The same of a block, forward and backward."""

COMPILED_BLOCK = {
    "small": (70, 33, 0.41),
    "large": (52, 33, 8.6),
    "xlarge": (33, 33, 6.2),
}
"""Kernels that torch's compiler writes for a block, its calls of libraries, and the most gigabytes, forward and
backward."""

COMPILED_FEATURES = (10, 7.2)
"""Operations, and the most gigabytes, of the compiled features of `large`."""


@needs_fake_gpu
@pytest.mark.parametrize("preset", list(A_BLOCK))
def test_a_step_has_a_known_number_of_operations_and_bytes_in_each_part(preset: str) -> None:
    one, two = (by_part(step(preset, num_layers=number)) for number in (1, 2))
    assert {part: one[part].operations for part in PARTS if part != "blocks"} == {
        part: operations for part, (operations, _) in OUTSIDE[preset].items()
    }
    assert one["blocks"].operations == two["blocks"].operations - one["blocks"].operations == A_BLOCK[preset][0]
    most = {**OUTSIDE[preset], "blocks": A_BLOCK[preset]}
    assert [part for part in PARTS if one[part].num_bytes / 1e9 > most[part][1]] == []


@needs_fake_gpu
@pytest.mark.parametrize("live", LIVE_PRESETS)
@pytest.mark.parametrize("preset", ["small", "large"])
def test_a_step_for_live_speech_has_at_most_a_tenth_more_of_everything(preset: str, live: str) -> None:
    offline, streaming = _whole_step(preset), _whole_step(f"{preset}+{live}")
    assert streaming.operations <= 1.1 * offline.operations
    assert streaming.num_bytes <= 1.1 * offline.num_bytes
    assert streaming.flops <= 1.1 * offline.flops


@cache
def _whole_step(preset: str) -> Count:
    """Counts steps of one and of two blocks, and adds the other blocks."""
    one, two = (by_part(step(preset, num_layers=number)) for number in (1, 2))
    num_others = NestConfig.preset(preset.split("+")[0]).encoder.num_layers - 1
    return sum([one[part] for part in PARTS] + num_others * [_difference(two["blocks"], one["blocks"])], Count())


def _difference(two: Count, one: Count) -> Count:
    return Count(**{name: value - getattr(one, name) for name, value in asdict(two).items()})


@needs_fake_gpu
@pytest.mark.parametrize(("preset", "tflop"), [("small", 0.3619), ("large", 17.68), ("xlarge", 36.6)])
def test_a_step_has_as_many_floating_point_operations_as_were_counted_on_a_gpu(preset: str, tflop: float) -> None:
    one, two = (sum((each.flops for each in step(preset, num_layers=number)), 0) for number in (1, 2))
    num_layers = {"small": 16, "large": 17, "xlarge": 24}[preset]
    # Of benchmarks/results/gpu_h100_2026-11.md, where another number of frames was scored, the quantizer computed the
    # tokens of all frames, and attention padded frames to a multiple of 8, here from 188 to 192.
    assert (one + (num_layers - 1) * (two - one)) / 1e12 == pytest.approx(tflop, rel=9e-3)


@needs_fake_gpu
@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="private functions of torch 2.11")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # in torch's compiler
@pytest.mark.parametrize("preset", list(COMPILED_BLOCK))
def test_a_compiled_block_has_a_known_number_of_kernels_and_bytes(preset: str) -> None:
    pytest.importorskip("triton", reason="torch's compiler writes code for it")
    _, codes = compile_block(preset)
    num_triton, num_library, most = COMPILED_BLOCK[preset]
    assert (sum(code.num_triton for code in codes), sum(code.num_library for code in codes)) == (
        num_triton,
        num_library,
    )
    assert sum(code.triton_bytes + code.library_bytes for code in codes) / 1e9 <= most


@needs_fake_gpu
@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="private functions of torch 2.11")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # in torch's compiler
def test_compiled_features_have_a_known_number_of_operations_and_bytes() -> None:
    pytest.importorskip("triton", reason="torch's compiler writes code for it")
    found = compiled_features("large", step("large", num_layers=1))
    operations, most = COMPILED_FEATURES
    assert found.operations == operations
    assert found.num_bytes / 1e9 <= most


@needs_fake_gpu
@pytest.mark.parametrize(("preset", "launches"), [("small", 170), ("large", 177), ("xlarge", 258)])
def test_a_step_of_graphs_has_a_known_number_of_launches_below_300(preset: str, launches: int) -> None:
    assert sum(count_launches(preset).values()) == launches < 300


@pytest.mark.parametrize(
    ("sizes", "num_lists", "launches"),
    [
        ([], 1, 0),
        ([0, 0], 1, 0),
        ([1], 1, 1),
        ([1] * 110, 1, 1),
        ([1] * 111, 1, 2),
        ([1] * 37, 4, 2),
        ([65536 * 320], 1, 1),
        ([65536 * 320 + 1], 1, 2),
        ([65536 * 319, 65536, 1], 4, 2),
        ([65536 * 321] + [1] * 108, 1, 2),
        ([65536 * 321] + [1] * 110, 1, 3),
    ],
)
def test_operations_on_lists_are_divided_into_launches_by_blocks_and_tensors(
    sizes: list[int], num_lists: int, launches: int
) -> None:
    assert list_launches(sizes, num_lists) == launches


@needs_fake_gpu
@pytest.mark.parametrize("is_divided", [False, True])
def test_adamw_writes_gradients_only_if_it_divides_them(is_divided: bool) -> None:
    with fake_gpu():
        weight = nn.Parameter(torch.ones(1000))
        weight.grad = torch.ones(1000)
        optimizer = torch.optim.AdamW([weight], fused=True)
        if is_divided:
            optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
        with OperationLog() as log:
            optimizer.step()
    (update,) = (operation for operation in log.operations if operation.name == "_fused_adamw_")
    # Reads weight, gradient and two moments, writes all but the gradient; and reads the number of the step.
    assert update.num_bytes - 4 - 4 * is_divided == 4 * 1000 * (7 + is_divided)


@pytest.mark.parametrize("is_gpu_path", [False, True])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_gradients_equal_those_of_torchs_engine(
    monkeypatch: pytest.MonkeyPatch, is_gpu_path: bool, checkpoint_activations: bool
) -> None:
    if is_gpu_path:
        monkeypatch.setattr(devices, "is_on_gpu", lambda _: True)
    network = NestNetwork(tiny_config(checkpoint_activations=checkpoint_activations)).train()
    found = []
    for run in (lambda loss: loss.backward(), backward):
        network.zero_grad()
        for _ in range(2):  # the second pass adds to gradients
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_gpu_path):  # converts the weights of a block together
                loss = loss_stats(network(noise_batch((2, 32000)))).nll_sum
            run(loss)
        found.append({name: parameter.grad for name, parameter in network.named_parameters()})
    assert [name for name, grad in found[0].items() if not _equal(grad, found[1][name])] == []


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def test_what_a_node_saved_is_freed_after_its_call() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with OperationLog() as log:

        def loss() -> torch.Tensor:
            x = weight
            for _ in range(10):
                x = x.sin()  # saves its input
            return x.sum()

        backward(loss())
    # Ten results of the forward pass; then, each gradient takes the place of what it was computed from.
    assert log.peak_bytes <= 13 * 4000
    assert log.kept_bytes == 4000


@needs_fake_gpu
def test_backward_operations_belong_to_the_part_of_their_forward_operations() -> None:
    with fake_gpu():
        first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        log = OperationLog()
        log.track(first, "first")
        log.track(second, "second")
        with log:
            for _ in range(2):
                x = second(F.silu(first(torch.ones(4, 8))))
                with log.part("loss"):
                    loss = x.sum()
                backward(loss)
    found = {(operation.part, operation.is_backward, operation.name) for operation in log.operations}
    assert found >= {("first", True, "mm"), ("second", True, "mm"), ("other", True, "silu_backward")}
    assert found >= {("first", True, "add_"), ("second", True, "add_"), ("loss", False, "sum")}
    assert ("other", True, "mm") not in found


@needs_fake_gpu
@pytest.mark.parametrize(
    ("expression", "operands"),
    [
        ("x + 1", 2),
        ("x + x.T", 3),
        ("x.add_(x)", 3),
        ("x.expand(5, 64, 64) + 1", 1 + 5),  # what is repeated is read once
        ("x.copy_(x.T)", 2),
        ("torch._foreach_add_([x, x.T], 1)", 4),
        ("torch._foreach_copy_([x], [x.T])", 2),
        ("torch.baddbmm(x[None], x[None], x[None], beta=0)", 3),
        ("torch.baddbmm(x[None], x[None], x[None])", 4),
        ("x.zero_()", 1),
        ("x.normal_()", 1),
        ("torch.randn_like(x)", 1),
    ],
)
def test_an_operation_reads_and_writes_its_operands_once(expression: str, operands: int) -> None:
    with fake_gpu():
        x = torch.ones(64, 64)
        with OperationLog() as log:
            eval(expression, {"torch": torch, "x": x})
    assert [operation.num_bytes for operation in log.operations] == [operands * 64 * 64 * 4]


def test_repeated_dimensions_take_no_bytes() -> None:
    assert Shape((5, 3, 2), (0, 2, 1), torch.float32).num_bytes == 3 * 2 * 4


@needs_fake_gpu
def test_the_floor_of_a_part_is_the_longer_time_of_each_operation() -> None:
    with fake_gpu(torch.bfloat16):
        x = torch.ones(8192, 8192, dtype=torch.bfloat16)
        with OperationLog() as log:
            (x @ x) + 1
    product, addition = (3 * 8192**2 * 2, 2 * 8192**3), (2 * 8192**2 * 2, 0)
    assert by_part(log.operations)["other"] == Count(
        operations=2,
        num_bytes=product[0] + addition[0],
        flops=product[1],
        floor_s=product[1] / 600e12 + addition[0] / 2.8e12,
    )


@needs_fake_gpu
def test_demand_is_counted_for_a_second_of_audio() -> None:
    demand = count_demand("small")
    assert demand.gflop_per_audio_s == pytest.approx(1.55, rel=0.01)
    assert demand.audio_s_per_s("A100", 0.5) == pytest.approx(0.5 * 312_000 / demand.gflop_per_audio_s)
