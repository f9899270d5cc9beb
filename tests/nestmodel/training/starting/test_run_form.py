from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nestdata import PlanConfig
from nestmodel import NestConfig, NestNetwork, TrainingError
from nestmodel.nn.gpu.forms import PLAIN, Forms, default_forms
from nestmodel.training.starting import run_form as module
from nestmodel.training.starting.run_form import RunForm, naming_kernels, run_form
from tests.training import tiny_config, trainer

GPU = 80e9
"""Memory of the GPU that the device stands for."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "default_forms", lambda _device, num_shapes: default_forms("cuda", num_shapes))
    monkeypatch.setattr(module, "_memory_of", lambda _device: GPU)


def form(
    directory: Path, config: NestConfig, seconds: float = 240.0, num_shapes: int | None = 8, kernels: Any = "auto"
) -> RunForm:
    plan = PlanConfig(max_batch_seconds=seconds, microbatches_per_step=1, num_shapes=num_shapes)
    return run_form(config, kernels, trainer(directory), plan)


def test_on_a_cpu_there_is_the_plain_form_only(tmp_path: Path) -> None:
    found = form(tmp_path, NestConfig.preset("small"))
    assert (found.forms, found.why_plain_blocks) == (PLAIN, "")
    assert found.why_no_graphs == "the form is torch"


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_the_form_follows_from_the_settings(tmp_path: Path) -> None:
    small = NestConfig.preset("small")
    assert str(form(tmp_path, small).forms) == "compiled for 8 shapes"
    assert str(form(tmp_path, small, num_shapes=None).forms) == "compiled"
    assert form(tmp_path, small, kernels="torch").forms == PLAIN


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("preset", "seconds", "num_shapes", "why"),
    [
        ("small", 2000.0, 8, ""),
        ("small", 240.0, None, "data.plan.num_shapes is not set"),
        ("large", 250.0, 16, ""),
        ("medium", 4000.0, 8, "the microbatches are so large that launches take no time"),
    ],
)
def test_graphs_are_used_where_launches_limit_the_step(
    preset: str, seconds: float, num_shapes: int | None, why: str, tmp_path: Path
) -> None:
    assert form(tmp_path, NestConfig.preset(preset), seconds, num_shapes).why_no_graphs == why


@pytest.mark.usefixtures("on_gpu")
def test_graphs_are_not_used_where_a_capture_cannot_follow_or_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recomputed = form(tmp_path, tiny_config(checkpoint_activations=True))
    assert recomputed.why_plain_blocks == recomputed.why_no_graphs == "checkpoint_activations is on"
    contexts = form(tmp_path, tiny_config(att_context_size=((8, 1), (8, 0)), att_context_style="chunked_limited"))
    assert contexts.why_no_graphs == "there are several attention contexts"
    small = NestConfig.preset("small")
    # 250 bytes for each value of 2,000 s, twice, are 35 GB.
    monkeypatch.setattr(module, "_memory_of", lambda _device: 40e9)
    assert form(tmp_path, small, 2000.0).why_no_graphs == "the activations may not fit into memory twice"
    assert form(tmp_path, small, 240.0).why_no_graphs == ""


@pytest.mark.parametrize("encoder", [{}, {"checkpoint_activations": True}])
def test_a_network_takes_each_form_and_returns_to_the_plain_one(encoder: dict[str, Any]) -> None:
    network = NestNetwork(replace(tiny_config(**encoder)))
    for num_shapes, expected in ((None, "varying shapes"), (2, "fixed shapes")):
        network.use_forms(Forms(subsampling_kernel=True, compiled=True, num_shapes=num_shapes))
        found = {layer.compiles_for for layer in network.encoder.layers}
        assert found == {None if encoder else expected}
    network.use_forms(PLAIN)
    assert {layer.compiles_for for layer in network.encoder.layers} == {None}
    assert not network.encoder.pre_encode.has_joined_stages


def test_an_error_of_compiled_code_names_the_setting_without_it() -> None:
    compiled = Forms(subsampling_kernel=True, compiled=True)
    with pytest.raises(TrainingError, match=r"\(compiled\) fails: RuntimeError, no compiler.*model\.kernels: torch"):
        with naming_kernels(compiled):
            raise RuntimeError("no compiler")
    with pytest.raises(RuntimeError, match="out of memory"), naming_kernels(compiled):
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="no compiler"), naming_kernels(PLAIN):
        raise RuntimeError("no compiler")
