import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from nestmodel import NestConfig, NestNetwork, TrainingError
from nestmodel.config import BackendName
from nestmodel.nn import backend as module
from nestmodel.nn.backend import TORCH, Backend, choose_backend, naming_backend
from tests.training import tiny_config

SMALL, CUDA = NestConfig.preset("small"), torch.device("cuda")


def chosen(
    config: NestConfig,
    device: torch.device = CUDA,
    num_shapes: int | None = 8,
    name: BackendName = "auto",
    shapes: Sequence[tuple[int, int]] = (),
) -> Backend:
    return choose_backend(name, config, device, "bf16-mixed", num_shapes, shapes)


def test_on_a_cpu_there_are_operations_of_torch_only() -> None:
    assert chosen(SMALL, torch.device("cpu")) == TORCH


def test_on_a_gpu_the_backend_follows_from_the_settings() -> None:
    assert str(chosen(SMALL)) == "compiled for 8 shapes"
    assert str(chosen(SMALL, num_shapes=None)) == "compiled"
    assert chosen(SMALL, name="torch") == TORCH
    assert "checkpoint_activations is on" in chosen(tiny_config(checkpoint_activations=True)).notes


def test_the_subsampling_keeps_its_activations_where_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    large, shapes = NestConfig.preset("large"), [(133, 15 * 16000), (8, 240 * 16000)]
    for gigabytes, keeps in ((80, True), (40, False)):
        monkeypatch.setattr(module, "_gpu_bytes", lambda _, size=gigabytes: size * 10**9)
        found = chosen(large, shapes=shapes)
        assert found.keeps_subsampling == keeps
        verb = "keeps" if keeps else "recomputes"
        assert re.match(rf"; the subsampling {verb} 1\.\d GB .* of {gigabytes}\.0 GB", found.notes)
        assert not chosen(large, name="torch", shapes=shapes).keeps_subsampling
        wanted = replace(large, encoder=replace(large.encoder, checkpoint_activations=True))
        assert not chosen(wanted, shapes=shapes).keeps_subsampling


@pytest.mark.parametrize("encoder", [{}, {"checkpoint_activations": True}])
def test_a_network_takes_each_backend_and_returns_to_that_of_torch(encoder: dict[str, Any]) -> None:
    network = NestNetwork(tiny_config(**encoder))
    for num_shapes in (None, 2):
        backend = Backend(kernels=True, compiled=True, num_shapes=num_shapes)
        network.use_backend(backend)
        assert {layer.backend for layer in network.encoder.layers} == {replace(backend, compiled=not encoder)}
    network.use_backend(TORCH)
    assert {layer.backend for layer in network.encoder.layers} == {TORCH}
    assert network.encoder.backend == network.encoder.pre_encode.backend == TORCH


def test_an_error_of_compiled_code_names_the_setting_without_it() -> None:
    compiled = Backend(kernels=True, compiled=True)
    with pytest.raises(TrainingError, match=r"\(compiled\) fails: RuntimeError, no compiler.*model\.backend: torch"):
        with naming_backend(compiled):
            raise RuntimeError("no compiler")
    with pytest.raises(RuntimeError, match="out of memory"), naming_backend(compiled):
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="no compiler"), naming_backend(TORCH):
        raise RuntimeError("no compiler")
