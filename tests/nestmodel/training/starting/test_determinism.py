import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nestmodel import CheckpointConfig, Checkpoints, ConfigError, NestNetwork, loss_stats, prepare_deterministic
from nestmodel.preflight.trial import noise_batch
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from tests.conftest import MessyCorpora
from tests.training import fit, tiny_config

WITHOUT_DETERMINISTIC_KERNEL = {
    *("avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool3d_with_indices", "adaptive_max_pool2d"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "reflection_pad1d"),
    *("reflection_pad2d", "reflection_pad3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
    *("upsample_trilinear3d", "nll_loss2d", "_ctc_loss", "_cudnn_ctc_loss", "_embedding_bag", "put_", "histc"),
    *("bincount", "median", "grid_sampler_2d", "grid_sampler_3d", "cumsum"),
}
"""Operations that raise an error on CUDA in deterministic mode, from torch's documentation of
`use_deterministic_algorithms`; `cumsum` for floating-point values only."""


pytestmark = pytest.mark.usefixtures("restored_determinism")


def test_the_environment_gets_what_cublas_and_nccl_need() -> None:
    prepare_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    prepare_deterministic()  # the ranks that inherit the variables do the same


@pytest.mark.parametrize(("name", "value"), [("NCCL_ALGO", "Tree"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")])
def test_another_value_is_an_error_that_changes_nothing(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=rf"needs {name}=.* sets it to '{value}'\. Unset {name}"):
        prepare_deterministic()
    assert dict(os.environ) == before


class Operations(TorchDispatchMode):
    """Records the names of operations, and of cumulative sums of floating-point values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name != "cumsum" or args[0].is_floating_point():
            self.names.add(name.removesuffix("_backward").removesuffix("_forward"))
        return func(*args, **(kwargs or {}))


def test_no_operation_of_a_step_lacks_a_deterministic_kernel_on_cuda() -> None:
    network = NestNetwork(tiny_config()).train()
    with Operations() as seen:
        loss_stats(network(noise_batch((2, 16000)))).loss.backward()
    assert {"nll_loss", "index_put", "native_batch_norm"} <= {
        name.replace("index_put_", "index_put").replace("_unsafe_index_put", "index_put") for name in seen.names
    }
    assert not seen.names & WITHOUT_DETERMINISTIC_KERNEL


def test_a_run_is_resumed_in_its_own_mode_only(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    saver = Checkpoints(CheckpointConfig(every_n_steps=1, directory=tmp_path / "saved"))
    _, first = fit(
        messy_corpora, tmp_path, max_steps=2, callbacks=[saver], enable_checkpointing=True, deterministic=True
    )
    path = next(found.path for found in find_checkpoints(tmp_path / "saved") if found.step == 1)
    _, rest = fit(messy_corpora, tmp_path, max_steps=2, ckpt_path=path, deterministic=True)
    assert rest.losses == first.losses[1:]
    with pytest.raises(ConfigError, match=r"trainer\.deterministic: True -> False"):
        fit(messy_corpora, tmp_path, max_steps=2, ckpt_path=path, deterministic=False)
