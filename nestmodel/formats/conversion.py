"""Models in and out: one file or directory in, one in another format out.

Owns the choice of format and the names of results. Leaves each format to its own module. Guarantees that what lies at
a target is whole, and that an export is refused before anything is written where the other side could not hold it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from nestdata import output_directory, output_file
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError, WeightsError
from nestmodel.formats.huggingface import check_huggingface, is_huggingface, write_huggingface
from nestmodel.formats.nemo_archive import write_nemo
from nestmodel.formats.onnx import write_onnx
from nestmodel.formats.safetensors import write_tensors
from nestmodel.formats.weights import CONFIG_KEY, ENCODER, WeightParts
from nestmodel.training.module import NestModel

ExportFormat = Literal["nemo", "huggingface", "safetensors", "onnx"]
_ENDINGS: Mapping[str, str] = {
    "nemo": ".nemo",
    "huggingface": ".huggingface",
    "safetensors": ".safetensors",
    "onnx": ".onnx",
}
# What a format holds of a model, and what it can hold.
_PARTS: Mapping[str, tuple[WeightParts, ...]] = {
    "nemo": ("all",),
    "huggingface": ("encoder",),
    "safetensors": ("encoder", "all"),
    "onnx": ("encoder",),
}


def import_model(source: Path, output: Path | None = None, *, overwrite: bool = False) -> Path:
    """Turns a whole model of another format into a checkpoint that every command of `nestmodel` takes.

    Args:
        source: A `.nemo` file, or safetensors that hold a whole model.
        output: The checkpoint; where None, it lies in the working directory and is called like the source.
        overwrite: Whether a file that lies there is replaced.

    Returns:
        Where the checkpoint is. It holds weights and configuration, and no state of an optimizer.

    Raises:
        WeightsError: The file cannot be read, does not hold a whole model, or the other cannot be written.
        OutputError: The target exists, or is being written by another run.
    """
    model = NestModel.from_checkpoint(source)
    output = output or Path(source.stem + ".ckpt")
    checkpoint = {
        CONFIG_KEY: asdict(model.config),
        "state_dict": model.state_dict(),
        # Without these `--ckpt_path` would not take it.
        "pytorch-lightning_version": version("pytorch-lightning"),
        "epoch": 0,
        "global_step": 0,
    }
    with output_file(output, overwrite=overwrite) as path, _writing(output):
        torch.save(checkpoint, path)
    return output


def export_model(
    source: Path,
    to: ExportFormat,
    output: Path | None = None,
    *,
    parts: WeightParts | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a model in a format of others.

    Args:
        source: What `NestModel.from_checkpoint` opens.
        to: The format.
        output: The file, or for Hugging Face the directory; where None, in the working directory and called like the
            source.
        parts: What is written: of safetensors the encoder or all, where None the encoder. NeMo's files hold all, the
            others the encoder.
        overwrite: Whether a result that lies there is replaced.

    Returns:
        Where it is.

    Raises:
        WeightsError: The source cannot be read, does not hold a whole model, or the other cannot be written.
        ConfigError: The format cannot hold the model.
        OutputError: The target exists, or is being written by another run.
    """
    parts = _PARTS[to][0] if parts is None else parts
    if parts not in _PARTS[to]:
        raise ConfigError(f"{to} holds {_PARTS[to][0]} of a model, not {parts}. Leave that out, or use safetensors.")
    output = output or Path(source.stem + _ENDINGS[to])
    model = NestModel.from_checkpoint(source)
    if to == "huggingface":
        _write_directory(output, model, overwrite)
        return output
    with output_file(output, overwrite=overwrite) as path:
        if to == "onnx":
            write_onnx(path, model.config, model.encoder)
            return output
        with _writing(output):
            if to == "nemo":
                write_nemo(path, model.config, model.state_dict())
            else:
                write_safetensors(path, model.config, model.state_dict(), parts)
    return output


def write_safetensors(path: Path, config: NestConfig, state: Mapping[str, Tensor], parts: WeightParts) -> None:
    """Writes weights under our names, with the configuration as JSON in the metadata.

    Raises:
        OSError: It cannot be written.
    """
    chosen = {name: value for name, value in state.items() if parts == "all" or name.startswith(ENCODER)}
    write_tensors(path, chosen, {CONFIG_KEY: json.dumps(asdict(config))})


def _write_directory(output: Path, model: NestModel, overwrite: bool) -> None:
    check_huggingface(model.config)
    with (
        output_directory(
            output, kind="a Hugging Face model", overwrite=overwrite, may_replace=is_huggingface
        ) as partial,
        _writing(output),
    ):
        write_huggingface(partial, model.config, model.state_dict())


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Names the target where a disk is full, of which torch says little."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise WeightsError(f"{output}: cannot be written ({reason}). Make room, or choose another place.") from error
