"""The guard of the form of training steps, with planted forms: what torch's compiler returns is replaced."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nestmodel import CheckpointConfig, Checkpoints, NestModel, TrainingError
from nestmodel.formats.training_record import SETTINGS_KEY
from nestmodel.nn.gpu import block
from nestmodel.nn.gpu.forms import Forms
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from nestmodel.training.starting import run_form
from tests.conftest import MessyCorpora
from tests.training import Recorder, messy_data, tiny_config, trainer

COMPILED = Forms(subsampling_kernel=True, compiled=True)
NUM_BLOCKS, MICROBATCHES = 2, 2

Block = Callable[..., Tensor]
Plant = Callable[[int, Tensor], Tensor]
"""Changes the output of a compiled block, or fails. It gets the number of the call, from 0."""


class GlobalState(Recorder):
    """Records the losses, and the state of torch's generator after each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: list[Tensor] = []
        self.num_validated = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.num_validated += 1

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.generator.append(torch.get_rng_state())


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plant], None]:
    """Returns a function that plants a compiled form as `auto`; a given function changes what its blocks return."""

    def plant_form(change: Plant) -> None:
        calls = iter(range(10_000))

        def compile_block(function: Block, _dynamic: object) -> Block:
            return lambda *args: change(next(calls), function(*args))

        monkeypatch.setattr(block, "_compile", compile_block)
        monkeypatch.setattr("nestmodel.nn.features._compiled", lambda function, _dynamic: function)
        monkeypatch.setattr(run_form, "default_forms", lambda _device, _num_shapes: COMPILED)

    return plant_form


def fit(
    corpora: MessyCorpora, directory: Path, *, kernels: Any = "auto", ckpt_path: Path | None = None, **settings: Any
) -> tuple[NestModel, GlobalState, list[str]]:
    """Trains for three steps of two microbatches; returns the warnings of the guard as well."""
    model, recorder = NestModel(tiny_config(), kernels=kernels), GlobalState()
    callbacks = [recorder, *settings.pop("callbacks", [])]
    with warnings.catch_warnings(record=True, action="always") as caught:
        runner = trainer(
            directory, callbacks, max_steps=3, limit_val_batches=1, val_check_interval=MICROBATCHES, **settings
        )
        runner.fit(model, datamodule=messy_data(corpora), ckpt_path=ckpt_path)
    texts = [str(each.message) for each in caught]
    return model, recorder, [text for text in texts if "plain form" in text or "form of training" in text]


def assert_same_bits(one: tuple[NestModel, GlobalState, Any], other: tuple[NestModel, GlobalState, Any]) -> None:
    assert one[1].losses == other[1].losses
    assert all(torch.equal(*states) for states in zip(one[1].generator, other[1].generator, strict=True))
    for (name, value), expected in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


def fails_at(call: int, error: Exception | None = None) -> Plant:
    """Returns a plant that computes what the plain form computes, and fails once."""

    def change(number: int, out: Tensor) -> Tensor:
        if number == call:
            raise error or RuntimeError("planted")
        return out

    return change


def wrong_gradient(_call: int, out: Tensor) -> Tensor:
    """Is right in the forward pass, and doubles the gradient."""
    doubled = 2 * out
    return doubled - out.detach()


def fails_backward(_call: int, out: Tensor) -> Tensor:
    def fail(_grad: Tensor) -> None:
        raise RuntimeError("planted")

    if out.requires_grad:
        out.register_hook(fail)
    return out


CHECKED = NUM_BLOCKS
"""Calls of compiled blocks in the comparison of the first microbatch."""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _, out: 3 * out.flip(1), "the loss of the first microbatch is "),
        (lambda _, out: out * torch.nan, "the loss of the first microbatch is nan instead of "),
        (wrong_gradient, "the norm of the gradients of the first microbatch is "),
        (fails_at(0), "RuntimeError: planted"),
        (fails_at(1), "RuntimeError: planted"),  # after statistics of the first block
        (fails_backward, "RuntimeError: planted"),
        (fails_at(CHECKED), "RuntimeError: planted"),  # in training, after the comparison
        (
            fails_at(CHECKED + (2 * MICROBATCHES + 1) * NUM_BLOCKS - 1),
            "RuntimeError: planted",
        ),  # in the last block of the second step
        (fails_at(CHECKED + MICROBATCHES * NUM_BLOCKS), "RuntimeError: planted"),  # in validation
    ],
)
def test_a_form_that_fails_or_differs_ends_in_the_bits_of_the_plain_form_with_one_warning(
    change: Plant,
    why: str,
    messy_corpora: MessyCorpora,
    tmp_path: Path,
    plant: Callable[[Plant], None],
) -> None:
    plain = fit(messy_corpora, tmp_path, kernels="torch")
    plant(change)
    guarded = fit(messy_corpora, tmp_path)
    assert_same_bits(guarded, plain)
    assert plain[2] == []
    (warning,) = guarded[2]
    assert warning.startswith("Training goes on in the plain form of PyTorch instead of the form compiled: ")
    assert why in warning
    assert str(guarded[0].forms) == "torch"


def test_a_form_that_agrees_stays_and_the_comparison_leaves_no_trace(
    messy_corpora: MessyCorpora, tmp_path: Path, plant: Callable[[Plant], None]
) -> None:
    plain = fit(messy_corpora, tmp_path, kernels="torch")
    calls = []

    def count(number: int, out: Tensor) -> Tensor:
        calls.append(number)
        return out

    plant(count)
    guarded = fit(messy_corpora, tmp_path)
    assert_same_bits(guarded, plain)
    assert guarded[2] == []
    assert guarded[0].forms == COMPILED
    assert len(calls) == CHECKED + NUM_BLOCKS * (len(guarded[1].losses) * MICROBATCHES + guarded[1].num_validated)


@pytest.mark.parametrize("call", [0, CHECKED])
def test_memory_that_runs_out_is_not_the_fault_of_a_form(
    call: int, messy_corpora: MessyCorpora, tmp_path: Path, plant: Callable[[Plant], None]
) -> None:
    plant(fails_at(call, torch.OutOfMemoryError("planted")))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        fit(messy_corpora, tmp_path)


def test_a_checkpoint_names_the_form_and_a_resume_in_another_one_says_so(
    messy_corpora: MessyCorpora, tmp_path: Path, plant: Callable[[Plant], None]
) -> None:
    def saved(directory: Path, **settings: Any) -> Path:
        saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=directory))
        fit(messy_corpora, tmp_path, callbacks=[saver], enable_checkpointing=True, **settings)
        return next(found.path for found in find_checkpoints(directory) if found.step == 2)

    def form_in(path: Path) -> str:
        return str(torch.load(path, weights_only=False)[SETTINGS_KEY]["model.kernels"])

    plant(fails_at(-1))
    compiled, plain = saved(tmp_path / "compiled"), saved(tmp_path / "plain", kernels="torch")
    assert (form_in(compiled), form_in(plain)) == ("'compiled'", "'torch'")
    assert fit(messy_corpora, tmp_path, ckpt_path=compiled)[2] == []
    changed = "the form of training steps was '{}' in the checkpoint and is '{}' now: rounding differs from here."
    assert fit(messy_corpora, tmp_path, kernels="torch", ckpt_path=compiled)[2] == [changed.format("compiled", "torch")]
    assert fit(messy_corpora, tmp_path, ckpt_path=plain)[2] == [changed.format("torch", "compiled")]

    plant(fails_at(0))
    assert form_in(saved(tmp_path / "given up")) == "'torch'"


@pytest.mark.usefixtures("restored_determinism")
def test_deterministic_mode_keeps_the_plain_form_of_a_checkpoint_and_gives_up_none(
    messy_corpora: MessyCorpora, tmp_path: Path, plant: Callable[[Plant], None]
) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=tmp_path / "saved"))
    settings: dict[str, Any] = {"deterministic": True}
    plain = fit(messy_corpora, tmp_path, kernels="torch", callbacks=[saver], enable_checkpointing=True, **settings)
    path = next(found.path for found in find_checkpoints(tmp_path / "saved") if found.step == 2)
    plant(fails_at(0))
    resumed = fit(messy_corpora, tmp_path, ckpt_path=path, **settings)
    assert (resumed[1].losses, resumed[2]) == (plain[1].losses[2:], [])
    with pytest.raises(TrainingError, match=r"\(compiled\) cannot be used: RuntimeError: planted.*kernels to torch"):
        fit(messy_corpora, tmp_path, **settings)
