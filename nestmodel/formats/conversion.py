"""Writing models: a network to a checkpoint, import to a checkpoint, export to another format.

This module selects the format and the default name of the result; other modules implement each format. A target is
either complete or not written, and an export that the format cannot hold is rejected before anything is written.
"""

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from nestdata import OutputError, output_directory, output_file
from nestmodel.attention_context import Context
from nestmodel.config import ExportFormat, MaskConfig, NestConfig, QuantizerConfig, WeightParts
from nestmodel.errors import ConfigError, WeightsError
from nestmodel.formats.hub import HUB, is_on_hub, parse_hub_name
from nestmodel.formats.huggingface import (
    CONFIG_FILE,
    EXTRACTOR_FILE,
    WEIGHTS_FILE,
    is_huggingface,
    write_huggingface,
)
from nestmodel.formats.model_card import Training, model_card
from nestmodel.formats.model_file import open_model_file
from nestmodel.formats.nemo_archive import write_nemo
from nestmodel.formats.onnx import write_onnx, write_onnx_chunk
from nestmodel.formats.safetensors import CONFIG_KEY, write_tensors
from nestmodel.formats.weights import ENCODER_PREFIX, digest_of, load_network
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.streaming import streaming_context

CARD_FILE = "README.md"

_log = logging.getLogger(__name__)

_FORMATS: Mapping[str, tuple[str, tuple[WeightParts, ...]]] = {
    "nemo": (".nemo", ("all",)),
    "huggingface": (".huggingface", ("encoder",)),
    "safetensors": (".safetensors", ("encoder", "all")),
    "onnx": (".onnx", ("encoder",)),
    "onnx-streaming": (".streaming.onnx", ("encoder",)),
}
"""Suffix of each format, and the parts of a model that it can hold; the first is the default."""


def save_network(
    network: NestNetwork, path: str | Path, *, overwrite: bool = False, sources: Sequence[str | Path] = ()
) -> Path:
    """Writes a network to a checkpoint, which `load_network` and every command of `nestmodel` accept.

    Args:
        network: A network on any device; of a `NestModel`, configuration and weights are written as well.
        path: The checkpoint to write.
        overwrite: Whether to replace an existing file.
        sources: Files that the network was made from, none of which may be the target.

    Returns:
        The path of the checkpoint. It holds weights and configuration, and no optimizer state.

    Raises:
        ConfigError: The name belongs to another format.
        WeightsError: The checkpoint cannot be written.
        OutputError: The target exists already or is one of the sources, or another run is writing it.
    """
    path = Path(path)
    other = next((name for name, (suffix, _) in _FORMATS.items() if path.suffix == suffix), None)
    if other is not None:
        raise ConfigError(
            f"{path}: save_network writes checkpoints. Give a name such as {path.stem}.ckpt, or call "
            f"export_model(network, {other!r}, {str(path)!r})."
        )
    checkpoint = {
        CONFIG_KEY: asdict(network.config),
        "state_dict": {name: value.detach().cpu() for name, value in network.state_dict().items()},
        # Required by `--ckpt-path`.
        "pytorch-lightning_version": version("pytorch-lightning"),
        "epoch": 0,
        "global_step": 0,
    }
    with output_file(path, overwrite=overwrite, inputs=_files(sources)) as partial, _naming_target(path):
        torch.save(checkpoint, partial)
    return path


def average_models(sources: Sequence[str | Path], output: str | Path, *, overwrite: bool = False) -> Path:
    """Writes the mean of the weights of several models, such as the last checkpoints of a run, to a checkpoint.

    Args:
        sources: Files that `load_network` reads, of equal sizes and settings. Weights that several of them have, such
            as `last.ckpt` and the checkpoint that it links to, are counted once, which is logged.
        output: The checkpoint to write.
        overwrite: Whether to replace an existing file.

    Returns:
        The path of the checkpoint.

    Raises:
        ConfigError: No file is given, or the settings of the files differ.
        WeightsError: A file cannot be read or does not hold a whole model, or the checkpoint cannot be written.
        OutputError: The target exists already, or another run is writing it.
    """
    if not sources:
        raise ConfigError("give the checkpoints whose weights are averaged.")
    network = load_network(sources[0])
    sums = {name: value.double() for name, value in network.state_dict().items() if value.is_floating_point()}
    counted = {digest_of(network): sources[0]}
    for source in sources[1:]:
        other = load_network(source)
        if other.config != network.config:
            raise ConfigError(f"{source}: its settings differ from {sources[0]}. Average models of one run.")
        if (digest := digest_of(other)) in counted:
            _log.warning("%s has the weights of %s, and is counted once", source, counted[digest])
            continue
        counted[digest] = source
        state = other.state_dict()
        for name, total in sums.items():
            total += state[name]
    for name, value in network.state_dict().items():
        if name in sums:
            value.copy_(sums[name] / len(counted))
    return save_network(network, output, overwrite=overwrite, sources=sources)


def import_model(source: str | Path, output: str | Path | None = None, *, overwrite: bool = False) -> Path:
    """Converts a whole model to a checkpoint that every command of `nestmodel` accepts.

    Args:
        source: A `.nemo` file, safetensors that hold a whole model, or a name on the Hugging Face hub such as
            `hf://owner/name`; see `load_network`.
        output: The checkpoint to write; None writes to the working directory, named after the source.
        overwrite: Whether to replace an existing file.

    Returns:
        The path of the checkpoint. It holds weights and configuration, and no optimizer state.

    Raises:
        WeightsError: The source cannot be read or does not hold a whole model, or the checkpoint cannot be written.
        OutputError: The target exists already, or another run is writing it.
        ConfigError: The name of the output belongs to another format, or the extra `hub` is not installed.
    """
    output = output or _stem(source) + ".ckpt"
    return save_network(load_network(source), output, overwrite=overwrite, sources=[source])


def export_model(
    source: NestNetwork | str | Path,
    to: ExportFormat,
    output: str | Path | None = None,
    *,
    parts: WeightParts | None = None,
    context: Context | None = None,
    overwrite: bool = False,
) -> Path:
    """Exports a model to NeMo, Hugging Face, safetensors or ONNX, with a model card.

    The card is `README.md` in a directory for Hugging Face, and `NAME.md` beside a file `NAME`. It names the training
    data, steps, settings and metrics that a checkpoint of `nestmodel fit` holds. For other files, and for a network,
    which may have changed since it was loaded, they are unknown. The licence has to be filled in.

    Args:
        source: A network, which is not changed, or any file that `load_network` reads.
        to: The format.
        output: The file to write, or the directory for Hugging Face; None writes to the working directory, named after
            the source. A network has no name, so an output is required.
        parts: The parts to write; None writes all for NeMo, and the encoder for the other formats. Only safetensors
            can hold either.
        context: The only attention context of the result, one of the encoder's contexts; by default, `onnx` has the
            first, `onnx-streaming` the first that can be streamed, and the other formats keep all.
        overwrite: Whether to replace an existing result.

    Returns:
        The path of the result.

    Raises:
        WeightsError: The source cannot be read or does not hold a whole model, or the result cannot be written.
        ConfigError: The format cannot hold the model, a network was given without an output, or the encoder has no such
            context.
        OutputError: The target exists already, or another run is writing it.
    """
    suffix, possible = _FORMATS[to]
    parts = possible[0] if parts is None else parts
    if parts not in possible:
        raise ConfigError(
            f"parts is {parts!r}: the format {to} can hold only {possible[0]!r}. Leave it out, or use safetensors."
        )
    if output is None:
        if isinstance(source, NestNetwork):
            raise ConfigError("output is missing: a network has no name. Give the path of the result.")
        output = _stem(source) + suffix
    output, inputs, known = Path(output), list[Path](), Training()
    if isinstance(source, NestNetwork):
        network = source
    else:
        network, inputs = load_network(source), _files([source])
        with open_model_file(source) as file:
            known = Training.of(file.entry)
    if to == "onnx-streaming":
        context = streaming_context(network.config, context)
    elif to == "onnx" and context is None:
        context = network.config.conformer.att_context_size[0]
    if context is not None:
        # An ONNX export runs the encoder in eval mode, on the CPU, by operations of torch.
        network = _copied(network) if network is source else network
        network.use_context(context)
    if to == "nemo":
        _warn_of_lost_targets(network.config)
    card = model_card(output.name, network.config, known, to=to, parts=parts, source=_name(network.source))
    if to == "huggingface":
        _write_directory(output, network, card, overwrite, inputs)
        return output
    beside = output.with_name(output.name + ".md")
    if beside.exists() and not overwrite:
        raise OutputError(f"{beside}: exists already. Choose another path, or pass --overwrite to replace it.")
    with output_file(output, overwrite=overwrite, inputs=inputs) as path:
        if to in ("onnx", "onnx-streaming"):
            (write_onnx if to == "onnx" else write_onnx_chunk)(path, network)
        with _naming_target(output):
            if to == "nemo":
                write_nemo(path, network.config, network.state_dict())
            elif to == "safetensors":
                write_safetensors(path, network.config, network.state_dict(), parts)
            path.with_name(beside.name).write_text(card, encoding="utf-8")
    return output


def write_safetensors(path: Path, config: NestConfig, state: Mapping[str, Tensor], parts: WeightParts) -> None:
    """Writes weights under our names, with the configuration as JSON in the metadata.

    Raises:
        OSError: The file cannot be written.
    """
    selected = {name: value for name, value in state.items() if parts == "all" or name.startswith(ENCODER_PREFIX)}
    write_tensors(path, selected, {CONFIG_KEY: json.dumps(asdict(config))})


def _write_directory(output: Path, network: NestNetwork, card: str, overwrite: bool, inputs: list[Path]) -> None:
    with (
        output_directory(
            output,
            kind="a Hugging Face model",
            names=re.compile("|".join(map(re.escape, (CONFIG_FILE, EXTRACTOR_FILE, WEIGHTS_FILE, CARD_FILE)))),
            overwrite=overwrite,
            may_replace=is_huggingface,
            inputs=inputs,
        ) as partial,
        _naming_target(output),
    ):
        write_huggingface(partial, network.config, network.state_dict())
        (partial / CARD_FILE).write_text(card, encoding="utf-8")


def _stem(source: str | Path) -> str:
    """Returns the name of a result without its suffix, which is the name of the source."""
    return parse_hub_name(source).name if is_on_hub(source) else Path(source).stem


def _files(sources: Sequence[str | Path]) -> list[Path]:
    """Returns the sources that are files on this machine."""
    return [Path(source) for source in sources if not is_on_hub(source)]


def _name(source: str | None) -> str | None:
    """Returns the name of the file that a network was loaded from, without its location on this machine."""
    return source if source is None or source.endswith(HUB) else Path(source).name


def _warn_of_lost_targets(config: NestConfig) -> None:
    """Warns of settings that decide what is learned, and that NeMo or its releases lack."""
    plain = QuantizerConfig.normalize, MaskConfig.target_shift
    if (config.quantizer.normalize, config.masking.target_shift) != plain:
        warnings.warn(
            "NeMo has no field for model.config.quantizer.normalize and model.config.masking.target_shift, so the file "
            "loses them: training that starts from it learns other targets.",
            stacklevel=3,
        )
    if config.quantizer.input_norm is not None:
        warnings.warn(
            "NeMo 3.0.0 has no model.config.quantizer.input_norm and rejects the file. NeMo with pull request 15589 "
            f"opens it and applies its own norm, which may not be {config.quantizer.input_norm!r}. For the encoder "
            "alone, remove quantizer.learnable_norm from model_config.yaml in the file.",
            stacklevel=3,
        )


def _copied(network: NestNetwork) -> NestNetwork:
    """Returns a network on the CPU with the same weights."""
    copy = NestNetwork(network.config)
    copy.load_state_dict(network.state_dict())
    copy.source = network.source
    return copy


@contextmanager
def _naming_target(output: Path) -> Iterator[None]:
    """Turns write errors into WeightsError that name the target; torch does not name it when a disk is full."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise WeightsError(
            f"{output}: cannot be written ({reason}). Free some space, or choose another path."
        ) from error
