"""Microbatches as graphs: on a CPU by a stand-in that records operations, and on a GPU by CUDA graphs.

The code for GPUs runs in both, in full precision or under bf16 autocast. Runs are compared bit by bit with runs that
call the same functions and capture nothing, and within rounding with runs that pad no rows.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from nestdata import MixConfig, PlanConfig
from nestmodel import (
    DataConfig,
    MaskConfig,
    NestConfig,
    NestDataModule,
    NestModel,
    NestNetwork,
    NetworkInput,
    loss_stats,
)
from nestmodel.nn.gpu import devices, step_graph
from nestmodel.nn.gpu.step_graph import Capture, CudaCapture, StepGraphs, pad_rows, row_capacity
from nestmodel.preflight.trial import TrialStep, noise_batch
from tests.conftest import MessyCorpora
from tests.tape import TapeCapture
from tests.training import ProportionalSteps, tiny_config, trainer

NUM_SHAPES, STEPS, MICROBATCHES = 2, 5, 3


def not_captured(work: Callable[[], None]) -> Callable[[], None]:
    """Takes the place of a capture: the same work runs anew each time."""
    return work


class Steps(pl.Callback):
    """Records the gradients of every step after the optimizer has used them, and the logged loss and norm."""

    def __init__(self) -> None:
        self.grads: list[dict[str, Tensor]] = []
        self.logged: list[tuple[float, float]] = []
        self.shapes: list[tuple[int, ...]] = []

    def on_before_zero_grad(self, _trainer: pl.Trainer, module: pl.LightningModule, _optimizer: object) -> None:
        self.grads.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, batch: Any, _index: int
    ) -> None:
        self.shapes.append(tuple(batch.audio.shape))
        metrics = trainer.callback_metrics
        if "train_loss" in metrics:
            self.logged.append((float(metrics["train_loss"]), float(metrics["grad_norm"])))


def data_of(corpora: MessyCorpora) -> NestDataModule:
    """Returns steps of three microbatches, which have two shapes."""
    plan = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=MICROBATCHES, num_shapes=NUM_SHAPES)
    return NestDataModule(
        DataConfig(corpora.speech, corpora.noise, corpora.speech, plan, MixConfig(prob=0.8), num_workers=0)
    )


def fit(
    corpora: MessyCorpora, directory: Path, capture: Capture | None, config: NestConfig | None = None, **settings: Any
) -> tuple[NestModel, Steps]:
    model, steps = NestModel(config or tiny_config()), Steps()
    if capture is not None:
        model.use_graphs(NUM_SHAPES, capture)
    callbacks = [steps, ProportionalSteps()]
    trainer(directory, callbacks, **{"max_steps": STEPS, **settings}).fit(model, datamodule=data_of(corpora))
    return model, steps


def differences(one: tuple[NestModel, Steps], other: tuple[NestModel, Steps]) -> list[str]:
    """Returns what is not equal, bit by bit."""
    (model, steps), (other_model, other_steps) = one, other
    assert len(steps.grads) == len(other_steps.grads)
    found = [] if steps.logged == other_steps.logged else ["logged"]
    for number, (grads, others) in enumerate(zip(steps.grads, other_steps.grads, strict=True)):
        assert grads.keys() == others.keys()
        found += [f"gradient {number} of {name}" for name, grad in grads.items() if not torch.equal(grad, others[name])]
    values = other_model.state_dict()
    return found + [name for name, value in model.state_dict().items() if not torch.equal(value, values[name])]


def assert_close(one: tuple[NestModel, Steps], other: tuple[NestModel, Steps]) -> None:
    """Compares runs whose sums over rows have another order; float32 rounds by 6e-8 of each term."""
    for (loss, norm), (other_loss, other_norm) in zip(one[1].logged, other[1].logged, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-4)
    for name, grad in one[1].grads[-1].items():
        assert (grad - other[1].grads[-1][name]).norm() < 1e-4 * grad.norm() + 1e-6, name
    for (name, value), other_value in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        torch.testing.assert_close(value, other_value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the code for GPUs on a CPU: that for a CPU reads keys of dropout, and a graph would fix their values."""
    monkeypatch.setattr(devices, "is_on_gpu", lambda _: True)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_path", "restored_determinism")
@pytest.mark.parametrize(("precision", "is_deterministic"), [("32-true", False), ("bf16-mixed", True)])
def test_replayed_steps_equal_those_without_a_capture(
    messy_corpora: MessyCorpora, tmp_path: Path, precision: str, is_deterministic: bool
) -> None:
    torch.use_deterministic_algorithms(is_deterministic)
    capture = TapeCapture()
    replayed = fit(messy_corpora, tmp_path, capture, precision=precision)
    run = fit(messy_corpora, tmp_path, not_captured, precision=precision)
    shapes = replayed[1].shapes
    assert len(set(shapes)) == NUM_SHAPES
    assert capture.num_captures == 2 * NUM_SHAPES
    assert capture.num_replays == 2 * (STEPS * MICROBATCHES - NUM_SHAPES)
    assert differences(replayed, run) == []


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_microbatches_with_more_scored_rows_than_the_capacity_run_without_a_graph(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    # So that before, between and after replayed microbatches of a step there are others.
    monkeypatch.setattr(step_graph, "row_capacity", lambda *sizes: int(share * row_capacity(*sizes)))
    captures = TapeCapture(), not_captured
    replayed, run = (fit(messy_corpora, tmp_path, capture) for capture in captures)
    num_replays = captures[0].num_replays // 2
    assert num_replays == 0 if share == 0.0 else 0 < num_replays < STEPS * MICROBATCHES - NUM_SHAPES
    assert differences(replayed, run) == []
    assert_close(replayed, fit(messy_corpora, tmp_path, None))


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize(
    ("fail_at", "error"),
    [(1, torch.OutOfMemoryError("planted")), (3, RuntimeError("planted"))],
)
def test_a_run_whose_capture_fails_goes_on_without_graphs(
    messy_corpora: MessyCorpora, tmp_path: Path, fail_at: int, error: Exception
) -> None:
    capture = TapeCapture(fail_at, error)
    with warnings.catch_warnings(record=True, action="always") as caught:
        failed = fit(messy_corpora, tmp_path, capture, precision="bf16-mixed")
    warned = [str(each.message) for each in caught if "CUDA graphs" in str(each.message)]
    assert warned == ["Microbatches run without CUDA graphs, because a capture failed: planted."]
    assert capture.num_captures == fail_at + 1
    plain = fit(messy_corpora, tmp_path, None, precision="bf16-mixed")
    # Losses of 16-bit logits, of which only the order of the sum differs.
    assert [loss for loss, _ in failed[1].logged] == pytest.approx([loss for loss, _ in plain[1].logged], rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_path")
def test_a_skipped_step_leaves_nothing_to_later_ones(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_input = NestModel.training_input

    def poisoned(self: NestModel, batch: Any) -> NetworkInput:
        if batch.key[1:] == (2, 1):
            audio = batch.audio.clone().fill_(torch.nan)
            batch = replace(batch, audio=audio, noisy_audio=audio)
        return training_input(self, batch)

    monkeypatch.setattr(NestModel, "training_input", poisoned)
    found = []
    for capture in (TapeCapture(), not_captured):
        with pytest.warns(UserWarning, match="step 2 is skipped"):
            found.append(fit(messy_corpora, tmp_path, capture))
    assert len(found[0][1].grads[3]) == 0, "the skipped step has no gradients"
    assert all(grad.isfinite().all() for grads in found[0][1].grads for grad in grads.values())
    assert differences(*found) == []


def padded_input(graphs: StepGraphs, network: NestNetwork) -> NetworkInput:
    batch = noise_batch((2, 32000))
    return NetworkInput.of(batch, graphs.pad(network.draw_masks(batch)), "cpu")


@pytest.mark.usefixtures("gpu_path")
def test_a_capture_changes_no_statistics_gradients_or_random_numbers() -> None:
    model = NestModel(tiny_config()).train()
    for module in model.encoder.modules():
        if hasattr(module, "start_collecting"):
            module.start_collecting()
    graphs = StepGraphs(model, 1, TapeCapture(), num_microbatches=1, num_ranks=1)
    batch = padded_input(graphs, model)
    graphs.forward(batch)
    graphs.backward()

    def state() -> list[Tensor]:
        collected = [m._collected.clone() for m in model.encoder.modules() if hasattr(m, "start_collecting")]
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [*collected, *grads, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]

    before = state()
    (captured,) = graphs._passes.values()
    captured.capture(TapeCapture())
    assert all(torch.equal(one, other) for one, other in zip(before, state(), strict=True))


@pytest.mark.usefixtures("gpu_path")
def test_trial_steps_run_as_graphs(tmp_path: Path) -> None:
    capture = TapeCapture()
    step = TrialStep(tiny_config(), trainer(tmp_path), capture=capture)
    for _ in range(3):
        step(noise_batch((2, 32000)))
    assert (capture.num_captures, capture.num_replays) == (2, 4)


@pytest.mark.parametrize(("num_codebooks", "position"), [(1, "pre_conv"), (2, "post_conv")])
def test_padded_rows_change_sums_by_rounding_and_counts_not_at_all(num_codebooks: int, position: Any) -> None:
    config = tiny_config(dropout=0.0, dropout_pre_encoder=0.0, dropout_att=0.0)
    quantizer = replace(config.quantizer, num_codebooks=num_codebooks)
    config = replace(config, quantizer=quantizer, masking=replace(config.masking, position=position))
    network = NestNetwork(config).eval()
    batch = noise_batch((3, 32000))
    masks = network.draw_masks(batch)
    number = len(masks.scored_rows)
    found = []
    for capacity in (None, number, number + 5, masks.is_scored.numel()):
        padded = masks if capacity is None else pad_rows(masks, capacity)
        rows = padded.scored_rows
        assert len(rows) == (number if capacity is None else capacity)
        assert len((rows % masks.is_scored.numel()).unique()) == len(rows), "no row occurs twice"
        is_scored = None if capacity is None else rows >= 0
        network.zero_grad()
        stats = loss_stats(network.forward_masked(NetworkInput.of(batch, padded, "cpu")), is_scored)
        stats.nll_sum.backward()
        found.append((stats.flatten(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}))
    (values, grads), (unpadded, unpadded_grads), *others = found
    assert torch.equal(values, unpadded)
    assert all(torch.equal(grad, unpadded_grads[name]) for name, grad in grads.items())
    for other, other_grads in others:
        assert torch.equal(values[1:], other[1:])
        torch.testing.assert_close(values[0], other[0])
        for name, grad in grads.items():
            assert (grad - other_grads[name]).norm() < 1e-4 * grad.norm() + 1e-6, name


@pytest.mark.parametrize("masking", [MaskConfig(), MaskConfig(position="post_conv"), MaskConfig(prob=0.0)])
def test_the_capacity_is_a_function_of_settings_and_shape_and_is_seldom_exceeded(masking: MaskConfig) -> None:
    network = NestNetwork(replace(tiny_config(), masking=masking))
    num_cuts, seconds = 16, 15
    batch = noise_batch((num_cuts, seconds * 16000))
    masks = [network.draw_masks(replace(batch, key=batch.key._replace(microbatch=number))) for number in range(50)]
    capacity = row_capacity(network, *masks[0].is_masked.shape)
    torch.manual_seed(1)
    assert capacity == row_capacity(network, *masks[0].is_masked.shape)
    numbers = torch.tensor([len(each.scored_rows) for each in masks]).double()
    assert numbers.max() <= capacity
    # At most the margin of 5 deviations, which 16 draws tell within a factor of two, and a multiple of 8.
    assert capacity <= numbers.mean() + 10 * numbers.std() + 16


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@ON_GPU
@pytest.mark.usefixtures("restored_determinism")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_cuda_graphs_equal_the_same_work_without_a_capture_in_deterministic_mode(
    messy_corpora: MessyCorpora, tmp_path: Path, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Without it, gradients of attention are added in any order.
    torch.use_deterministic_algorithms(True)
    settings: dict[str, Any] = {"accelerator": "gpu", "precision": precision}
    captures = CudaCapture(), not_captured
    replayed, run = (fit(messy_corpora, tmp_path, capture, **settings) for capture in captures)
    assert captures[0]._pool is not None
    assert differences(replayed, run) == []


@pytest.mark.gpu
@ON_GPU
def test_cuda_graphs_share_the_memory_of_one_pool(tmp_path: Path) -> None:
    runner = trainer(tmp_path, accelerator="gpu", precision="bf16-mixed")
    step = TrialStep(tiny_config(), runner, capture=CudaCapture(), num_shapes=2)
    reserved = []
    for seconds in (20, 18):
        for _ in range(3):
            step(noise_batch((8, 16000 * seconds)))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] < 1.2 * reserved[0]


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted")


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize(
    ("fail", "message"), [(lambda: torch.cuda.synchronize(), "captur"), (out_of_memory, "planted")]
)
def test_a_failed_capture_leaves_stream_generator_allocator_and_earlier_graphs_usable(fail: Any, message: str) -> None:
    x = torch.ones(3, device="cuda")
    stream, capture = torch.cuda.current_stream(), CudaCapture()

    def add() -> None:
        x.add_(torch.ones(1 << 20, device="cuda")[:3])

    replay = capture(add)

    def add_and_fail() -> None:
        add()
        fail()

    with pytest.raises(RuntimeError, match=message):
        capture(add_and_fail)
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").isfinite().all()
    torch.cuda.empty_cache()  # which a capture that never ends does not allow
    replay()
    assert x.tolist() == [2.0, 2.0, 2.0]
    del replay  # releases the pool, which ends the process if the failed capture released it twice
    capture(add)()
    assert x.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.usefixtures("gpu_path")
def test_gradients_are_added_to_those_of_other_microbatches_and_results_are_kept() -> None:
    network = NestNetwork(tiny_config()).train()
    graphs = StepGraphs(network, 1, TapeCapture(), num_microbatches=1, num_ranks=1)
    batch = padded_input(graphs, network)
    louder = replace(batch, noisy_audio=2 * batch.noisy_audio.roll(100))
    trained = [p for p in network.parameters() if p.requires_grad]

    def run(of: Any, earlier: float | None) -> tuple[Tensor, list[Tensor]]:
        for parameter in trained:
            parameter.grad = None if earlier is None else torch.full_like(parameter, earlier)
        torch.manual_seed(0)
        stats = graphs.forward(of)
        assert stats is not None
        graphs.backward()
        return stats.nll_sum, [p.grad.clone() for p in trained if p.grad is not None]

    run(batch, None)  # the warm-up
    loss, grads = run(batch, None)
    kept = loss.clone()
    _, added = run(batch, 1.0)
    assert all(torch.equal(one, other + 1.0) for one, other in zip(added, grads, strict=True))
    other_loss, _ = run(louder, None)
    assert torch.equal(loss, kept)
    assert not torch.equal(loss, other_loss)
