from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pytorch_lightning.callbacks import LambdaCallback
from torch import Tensor, nn

from nestmodel.config import OptimizerConfig
from nestmodel.errors import ConfigError
from nestmodel.nn.gpu import devices
from nestmodel.training.schedule import build_optimizer, check_schedule, divide_and_clip, learning_rate, noam_lr
from tests.conftest import MessyCorpora
from tests.training import fit, tiny_config

CONFIG = OptimizerConfig(lr=5.0, warmup_steps=25000, min_lr=1e-6)


@pytest.mark.parametrize(("step", "rate"), [(1, 5.590e-8), (1000, 5.590e-5), (25000, 1.39754e-3), (40000, 1.10485e-3)])
def test_learning_rate_of_the_large_model(step: int, rate: float) -> None:
    assert noam_lr(step, CONFIG, 512) == pytest.approx(rate, rel=1e-4)


def test_the_minimum_applies_after_the_warm_up_only() -> None:
    config = replace(CONFIG, warmup_steps=10, min_lr=1.0)
    assert noam_lr(10, config, 512) == pytest.approx(5.0 / 512**0.5 / 10**0.5)
    assert noam_lr(11, config, 512) == 1.0


COSINE = OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=100, min_lr=1e-5)


@pytest.mark.parametrize(
    ("config", "step", "rate"),
    [
        (COSINE, 0, 1e-5),
        (COSINE, 49, 5e-4),
        (COSINE, 99, 1e-3),
        (COSINE, 549, (1e-3 + 1e-5) / 2),
        (COSINE, 999, 1e-5),
        (COSINE, 1000, 1e-5),
        (replace(COSINE, schedule="wsd"), 799, 1e-3),
        (replace(COSINE, schedule="wsd"), 899, (1e-3 + 1e-5) / 2),
        (replace(COSINE, schedule="wsd"), 999, 1e-5),
        (replace(COSINE, schedule="wsd", decay_share=1.0), 549, (1e-3 + 1e-5) / 2),
    ],
)
def test_a_rate_rises_to_lr_and_ends_at_the_minimum(config: OptimizerConfig, step: int, rate: float) -> None:
    assert learning_rate(step, config, 512, 1000) == pytest.approx(rate)


@pytest.mark.parametrize("num_steps", [-1, 100])
def test_a_schedule_that_ends_with_the_run_needs_its_length(num_steps: int) -> None:
    check_schedule(CONFIG, num_steps)
    with pytest.raises(ConfigError, match=r"optimizer\.schedule cosine ends at trainer\.max_steps"):
        check_schedule(COSINE, num_steps)


def test_each_optimizer_step_has_the_learning_rate_of_the_steps_before_it(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    rates: list[float] = []
    seen = LambdaCallback(on_before_optimizer_step=lambda *given: rates.append(given[2].param_groups[0]["lr"]))
    fit(messy_corpora, tmp_path, max_steps=4, callbacks=[seen])
    # As in NeMo, whose schedule counts finished steps: the first two steps have the learning rate of step 1.
    assert rates == pytest.approx([noam_lr(step, tiny_config().optimizer, 16) for step in (1, 1, 2, 3)], rel=1e-12)
    assert rates[0] == pytest.approx(1 / 4 / 10**1.5)


def stepped(
    sums: list[Tensor], num_tokens: float, max_norm: float | None, *, is_on_gpu: bool, is_last_change: bool = True
) -> tuple[float, list[Tensor], list[Tensor], bool]:
    """Divides and clips gradients, and steps; returns the norm, the gradients, the weights, and if AdamW divided.

    The eps of AdamW is 1, so that updates are about proportional to gradients.
    """
    weights = [nn.Parameter(torch.zeros_like(each)) for each in sums]
    for weight, grad in zip(weights, sums, strict=True):
        weight.grad = grad.clone()
    optimizer = build_optimizer([*weights, nn.Parameter(torch.ones(2))], CONFIG, 512, torch.device("cpu"))["optimizer"]
    for group in optimizer.param_groups:
        group.update(lr=1.0, eps=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_on_gpu", lambda _: is_on_gpu)
        norm = divide_and_clip(optimizer, torch.tensor(num_tokens), max_norm, is_last_change=is_last_change)
    optimizer.step()
    grads = [weight.grad for weight in weights if weight.grad is not None]
    return float(norm), grads, [weight.detach() for weight in weights], hasattr(optimizer, "grad_scale")


@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4),
    scale=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e6]),
    num_tokens=st.integers(1, 10**6),
    max_norm=st.none() | st.floats(1e-3, 1e3),
    is_on_gpu=st.booleans(),
    is_last_change=st.booleans(),
)
@example(seed=0, shapes=[[3]], scale=1.0, num_tokens=1, max_norm=1e-3, is_on_gpu=True, is_last_change=True)
@example(seed=0, shapes=[[3]], scale=0.0, num_tokens=1, max_norm=1e-3, is_on_gpu=True, is_last_change=True)
def test_gradients_are_those_that_torch_divides_and_clips(
    seed: int,
    shapes: list[list[int]],
    scale: float,
    num_tokens: int,
    max_norm: float | None,
    is_on_gpu: bool,
    is_last_change: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums = [scale * torch.randn(shape, generator=generator) for shape in shapes]
    exact = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    for weight, grad in zip(exact, sums, strict=True):
        weight.grad = grad.double() / num_tokens
    exact_norm = torch.nn.utils.clip_grad_norm_(exact, float("inf") if max_norm is None else max_norm)
    norm, grads, weights, by_optimizer = stepped(
        sums, float(num_tokens), max_norm, is_on_gpu=is_on_gpu, is_last_change=is_last_change
    )
    assert by_optimizer == (is_on_gpu and is_last_change)
    # A few roundings of float32.
    assert norm == pytest.approx(float(exact_norm), rel=1e-6, abs=1e-30)
    for grad, reference in zip(grads, exact, strict=True):
        assert reference.grad is not None
        torch.testing.assert_close(grad.double(), reference.grad, rtol=1e-6, atol=1e-30)
    if max_norm is None or float(exact_norm) < 0.99 * max_norm:
        unclipped = stepped(sums, float(num_tokens), None, is_on_gpu=False)
        assert all(torch.equal(a, b) for a, b in zip(weights, unclipped[2], strict=True))
    for weight, other in zip(weights, stepped(sums, float(num_tokens), max_norm, is_on_gpu=False)[2], strict=True):
        # AdamW rounds one division; in passes, a division and a multiplication are rounded.
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-12)
