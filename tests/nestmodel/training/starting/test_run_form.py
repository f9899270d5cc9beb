import re
from collections.abc import Sequence
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


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "default_forms", lambda _device, num_shapes: default_forms("cuda", num_shapes))


def form(
    directory: Path,
    config: NestConfig,
    num_shapes: int | None = 8,
    kernels: Any = "auto",
    shapes: Sequence[tuple[int, int]] = (),
) -> RunForm:
    plan = PlanConfig(max_batch_seconds=240.0, microbatches_per_step=1, num_shapes=num_shapes)
    return run_form(config, kernels, trainer(directory, precision="bf16-mixed"), plan, shapes)


def test_on_a_cpu_there_is_the_plain_form_only(tmp_path: Path) -> None:
    found = form(tmp_path, NestConfig.preset("small"))
    assert (found.forms, found.why_plain_blocks) == (PLAIN, "")


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_the_form_follows_from_the_settings(tmp_path: Path) -> None:
    small = NestConfig.preset("small")
    assert str(form(tmp_path, small).forms) == "compiled for 8 shapes"
    assert str(form(tmp_path, small, num_shapes=None).forms) == "compiled"
    assert form(tmp_path, small, kernels="torch").forms == PLAIN
    recomputed = form(tmp_path, tiny_config(checkpoint_activations=True))
    assert recomputed.why_plain_blocks == "checkpoint_activations is on"


@pytest.mark.usefixtures("on_gpu")
def test_the_subsampling_keeps_its_activations_where_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, shapes = NestConfig.preset("large"), [(133, 15 * 16000), (8, 240 * 16000)]
    for gigabytes, keeps in ((80, True), (40, False)):
        monkeypatch.setattr(module, "_gpu_bytes", lambda _, size=gigabytes: size * 10**9)
        found = form(tmp_path, large, shapes=shapes)
        assert found.forms.keeps_subsampling == keeps
        verb = "keeps" if keeps else "recomputes"
        assert re.match(
            rf"compiled for 8 shapes; the subsampling {verb} 1\.\d GB .* of {gigabytes}\.0 GB", found.summary
        )
        assert not form(tmp_path, large, kernels="torch", shapes=shapes).forms.keeps_subsampling
        wanted = replace(large, encoder=replace(large.encoder, checkpoint_activations=True))
        assert not form(tmp_path, wanted, shapes=shapes).forms.keeps_subsampling


@pytest.mark.parametrize("encoder", [{}, {"checkpoint_activations": True}])
def test_a_network_takes_each_form_and_returns_to_the_plain_one(encoder: dict[str, Any]) -> None:
    network = NestNetwork(replace(tiny_config(**encoder)))
    for num_shapes, expected in ((None, "varying shapes"), (2, "fixed shapes")):
        network.use_forms(Forms(kernels=True, compiled=True, num_shapes=num_shapes))
        found = {layer.compiles_for for layer in network.encoder.layers}
        assert found == {None if encoder else expected}
    network.use_forms(PLAIN)
    assert {layer.compiles_for for layer in network.encoder.layers} == {None}
    assert not network.encoder.pre_encode.has_joined_stages


def test_an_error_of_compiled_code_names_the_setting_without_it() -> None:
    compiled = Forms(kernels=True, compiled=True)
    with pytest.raises(TrainingError, match=r"\(compiled\) fails: RuntimeError, no compiler.*model\.kernels: torch"):
        with naming_kernels(compiled):
            raise RuntimeError("no compiler")
    with pytest.raises(RuntimeError, match="out of memory"), naming_kernels(compiled):
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="no compiler"), naming_kernels(PLAIN):
        raise RuntimeError("no compiler")
