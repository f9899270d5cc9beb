"""Loading the weights of model files into networks.

A report lists the weights that were loaded, unused, missing or of another shape. See `model_file` for the kinds of
files that can be read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nestmodel.attention_context import Context
from nestmodel.class_config import ClassConfig
from nestmodel.config import NestConfig, WeightParts
from nestmodel.errors import ConfigError, WeightsError
from nestmodel.formats.model_file import open_model_file
from nestmodel.nn.encoder_base import Encoder
from nestmodel.nn.network import NestNetwork

ENCODER_PREFIX = "encoder."
_MAX_NAMES_SHOWN = 4
_FRONT_END_PREFIX = "preprocessor."
# Parameters of a file that no model uses: NeMo's parent class creates them.
_IGNORED_PREFIXES = ("decoder_ssl.",)
# Settings that do not change what the weights compute, or whose difference is visible in names and shapes of weights.
_IGNORED_SETTINGS = (
    *("dither", "pad_to", "dropout", "dropout_pre_encoder", "dropout_att", "dropout_emb"),
    *("checkpoint_activations", "att_context_probs"),
    *("num_layers", "d_model", "subsampling_channels", "ff_expansion", "conv_kernel_size"),
    *("num_classes", "num_codebooks", "code_dim"),
)


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Which weights of a file were loaded into a network, by name."""

    path: Path
    loaded: tuple[str, ...]
    """Weights that were copied from the file into the network."""

    unused: tuple[str, ...]
    """Weights in the file that are not in the selected part of the network."""

    missing: tuple[str, ...]
    """Weights in the selected part of the network that are not in the file. They are unchanged."""

    mismatched: tuple[str, ...]
    """Weights whose shapes differ between file and network, each with both shapes. They are unchanged."""

    differing_settings: tuple[str, ...] = ()
    """Settings that change the meaning of the weights and differ between the configurations of network and file; empty
    if the file has no configuration that can be read."""

    def summary(self) -> str:
        """Returns one line with the number of weights of each kind; long lists of names are abbreviated."""
        parts = [f"{self.path}: {len(self.loaded)} weights loaded"]
        for word, names in (("unused", self.unused), ("missing", self.missing), ("mismatched", self.mismatched)):
            parts.append(f"{len(names)} {word}" + (f" ({abbreviate_names(names)})" if names else ""))
        return ", ".join(parts)


def load_network(path: str | Path, context: Context | None = None, *, encoder: Encoder | None = None) -> NestNetwork:
    """Builds a network from a model file, with its configuration and all its weights, on the CPU and in eval mode.

    Call `train()` of the network to train it further.

    Args:
        path: A `.nemo` file, a checkpoint of `nestmodel fit`, `save_network` or NeMo, or a safetensors file; or the
            name of a repository on the Hugging Face hub that has one such file: `hf://owner/name`, `hf://owner/name@revision`
            or `hf://owner/name@revision/file`. It is downloaded to the cache of huggingface_hub.
        context: One of the attention contexts that the encoder was trained with, to use instead of the first of them.
        encoder: An object like the one that the model was trained with, if that was given as an object.

    Raises:
        ConfigError: The name is one of the hub, and the extra `hub` is not installed; or the encoder has no such
            context, or its class cannot be built.
        WeightsError: The file cannot be read, or does not hold a whole model.
    """
    with open_model_file(path) as file:
        config, state = file.read_config(), file.read_state()
        is_own = encoder is not None or isinstance(config.encoder, ClassConfig)
        if is_own:
            _check_own(config, state, file.path, encoder)
        else:
            _check_shapes(config, state, file.path)
        network = NestNetwork(config, encoder).eval()
        if is_own:
            _check_complete(compare_weights(network.state_dict(), state, file.path))
        _copy_weights(network, state, file.path, "all")
        network.source = file.source
    if context is not None:
        network.use_context(context)
    return network


def _check_shapes(config: NestConfig, state: Mapping[str, Tensor], path: Path) -> None:
    """Raises WeightsError unless a state fits a network; takes no memory, even if the file claims huge sizes."""
    try:
        with torch.device("meta"):
            shapes = NestNetwork(config).state_dict()
    except (OverflowError, RuntimeError, TypeError) as error:  # numbers or products of more than 63 bits
        raise WeightsError(f"{path}: its configuration has impossible sizes ({error}). Export it again.") from error
    _check_complete(compare_weights(shapes, state, path))


def _check_own(config: NestConfig, state: Mapping[str, Tensor], path: Path, encoder: Encoder | None) -> None:
    """Checks the file of a model with an encoder of another author, before the model is built.

    Raises:
        ConfigError: The given encoder is of another class than the encoder of the file.
        WeightsError: The file claims other sizes than its weights have.
    """
    if encoder is not None and ClassConfig.of(encoder).class_path != getattr(config.encoder, "class_path", None):
        expected = getattr(config.encoder, "class_path", "FastConformer, which needs no `encoder`")
        raise ConfigError(f"{path}: its encoder is {expected}, and not {ClassConfig.of(encoder).class_path}.")
    quantizer, codes = config.quantizer, state.get("quantizer.codebooks")
    sizes = (quantizer.num_codebooks, quantizer.num_classes, quantizer.code_dim)
    if codes is None or codes.shape != sizes:
        raise WeightsError(f"{path}: its codebooks do not have the sizes of its configuration. Export it again.")


def load_weights(network: NestNetwork, path: str | Path, parts: WeightParts = "all") -> WeightReport:
    """Copies the weights of a file into a network, in place, where names and shapes match.

    Args:
        network: The network to modify.
        path: Any file that `load_network` reads, or a folder that `nestmodel export --to huggingface` has written.
        parts: Whether to load all weights or only the encoder's.

    Raises:
        WeightsError: The file cannot be read, or none of its parameters fits.
        ConfigError: The name is one of the hub, and the extra `hub` is not installed.
    """
    with open_model_file(path) as file:
        report = _copy_weights(network, file.read_state(), file.path, parts)
        try:
            file_config = file.read_config()
        except WeightsError:
            return report
        return replace(report, differing_settings=differing_settings(network.config, file_config, parts))


def digest_of(network: NestNetwork) -> str:
    """Returns a digest of the configuration and the weights of a network."""
    digest = hashlib.blake2b(json.dumps(asdict(network.config)).encode(), digest_size=16)
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def differing_settings(config: NestConfig, file_config: NestConfig, parts: WeightParts = "all") -> tuple[str, ...]:
    """Lists differences between the settings of a network and of a file that change the meaning of the weights.

    An example is `encoder.xscaling`, which does not show in the shape of any weight.

    Args:
        config: Configuration of the network.
        file_config: Configuration of the file.
        parts: The weights that are loaded. The encoder's weights do not depend on the quantizer.
    """
    settings, file_settings = asdict(config), asdict(file_config)
    return tuple(
        f"{section}.{field} is {value!r} in the model and {file_settings[section].get(field)!r} in the file"
        for section in ("features", "encoder", *(["quantizer"] if parts == "all" else []))
        for field, value in settings[section].items()
        if field not in _IGNORED_SETTINGS and value != file_settings[section].get(field)
    )


def abbreviate_names(names: Sequence[str]) -> str:
    """Joins the first names with commas, and counts the others."""
    num_more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "")


def _copy_weights(network: NestNetwork, state: Mapping[str, Tensor], path: Path, parts: WeightParts) -> WeightReport:
    """Copies weights where names and shapes match; raises if they match in the front end only."""
    selected = {
        name: value for name, value in network.state_dict().items() if parts == "all" or name.startswith(ENCODER_PREFIX)
    }
    report = compare_weights(selected, state, path)
    # Window and filterbank have the same shapes in models of all sizes.
    if all(name.startswith(_FRONT_END_PREFIX) for name in report.loaded):
        raise WeightsError(f"{report.summary()}. None of them fits the model: give another file, or change the model.")
    with torch.no_grad():
        for name in report.loaded:
            selected[name].copy_(state[name])
    return report


def compare_weights(selected: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path) -> WeightReport:
    """Compares the selected weights of a network with the weights of a file, by name and shape."""
    common = [name for name in selected if name in state]
    return WeightReport(
        path=path,
        loaded=tuple(name for name in common if state[name].shape == selected[name].shape),
        unused=tuple(name for name in state if name not in selected),
        missing=tuple(name for name in selected if name not in state),
        mismatched=tuple(
            f"{name}: {_shape(state[name])} in the file, {_shape(selected[name])} in the model"
            for name in common
            if state[name].shape != selected[name].shape
        ),
    )


def _check_complete(report: WeightReport) -> None:
    """Raises WeightsError unless the file and the network have the same weights."""
    unused = [name for name in report.unused if not name.startswith(_IGNORED_PREFIXES)]
    problems = (*report.missing, *report.mismatched, *unused)
    if report.missing and not any(name.startswith(ENCODER_PREFIX) for name in problems):
        raise WeightsError(
            f"{report.path}: holds the encoder and not the whole model ({abbreviate_names(report.missing)} missing). "
            "Start a model from it: --init-from with --model.init-parts encoder."
        )
    if problems:
        raise WeightsError(f"{report.summary()}. The weights do not match the configuration in the file.")


def _shape(value: Tensor) -> str:
    return " x ".join(map(str, value.shape)) or "scalar"
