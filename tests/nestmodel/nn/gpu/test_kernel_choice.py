import pytest

from nestmodel import ConfigError, Kernels, NestNetwork
from nestmodel.nn.gpu.block import AcceleratedConformerBlock
from nestmodel.nn.gpu.kernel_choice import default_kernels
from tests.training import tiny_config


def test_forms_that_are_set_by_hand_are_kept() -> None:
    kernels = Kernels(blocks="compiled")
    assert kernels.open_parts() == ["features", "subsampling", "step"]
    chosen = Kernels(features="torch", subsampling="triton", blocks="torch", step="torch")
    assert kernels.resolve(chosen) == Kernels(features="torch", subsampling="triton", blocks="compiled", step="torch")


def test_without_a_measurement_only_a_gpu_joins_stages_of_the_subsampling() -> None:
    assert default_kernels("cuda").subsampling == "triton"
    assert default_kernels("cpu").subsampling == "torch"
    for device in ("cuda", "cpu"):
        assert default_kernels(device).open_parts() == []


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # from torch's compiler
def test_a_network_uses_the_forms_that_it_is_given() -> None:
    network = NestNetwork(tiny_config())
    subsampling, block = network.encoder.pre_encode, network.encoder.layers[0]
    assert isinstance(block, AcceleratedConformerBlock)
    network.use_kernels(Kernels(), num_shapes=None)
    assert subsampling.has_joined_stages
    assert block.compiler is None
    assert not network.features._is_compiled
    for blocks in ("compiled", "combined"):
        network.use_kernels(Kernels(features="compiled", subsampling="torch", blocks=blocks), num_shapes=1)
        assert not subsampling.has_joined_stages
        assert block.compiler is not None
        assert block.compiler.combined == (blocks == "combined")
        assert network.features._is_compiled


def test_a_form_that_is_not_available_is_rejected() -> None:
    with pytest.raises(ConfigError, match="not available"):
        NestNetwork(tiny_config()).use_kernels(Kernels(step="graph"), num_shapes=None)
