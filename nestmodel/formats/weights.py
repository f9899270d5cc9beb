"""Weights of other files: read from what NeMo, Lightning and safetensors write, and put into a model.

Owns telling the kinds of files apart, by their content and not by their names, and the report of what was taken.
Leaves the layout of a `.nemo` file to `nemo_file`. Guarantees that no file runs code while it is read, and that a
damaged one is an error that names it.
"""

import json
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from nestmodel.config import NestConfig
from nestmodel.errors import NestModelError, WeightsError
from nestmodel.formats.nemo_archive import read_nemo_config, read_nemo_state
from nestmodel.formats.safetensors import read_metadata, read_tensors

WeightParts = Literal["all", "encoder"]
CONFIG_KEY = "nest_config"
"""What our configuration is called in a checkpoint, and in the metadata of a safetensors file, where it is JSON."""

ENCODER = "encoder."
_FRONT_END = "preprocessor."
# Parameters that a file may hold and no model uses: NeMo's parent class makes them.
_UNUSED = ("decoder_ssl.",)
# Settings that may differ between two models that compute the same, or that a report of names and shapes shows.
_HARMLESS = (
    *("dither", "pad_to", "dropout", "dropout_pre_encoder", "dropout_att", "dropout_emb", "checkpoint_activations"),
    *("num_layers", "d_model", "subsampling_channels", "ff_expansion", "conv_kernel_size"),
)
# What torch, tarfile, zlib and yaml say of a file that is damaged, or not what it seems.
_BROKEN = (
    *(OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile),
    *(tarfile.TarError, zlib.error, lzma.LZMAError, yaml.YAMLError),
    # These torch's reader of pickles lets out.
    *(AssertionError, AttributeError, IndexError, TypeError),
)


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What became of the weights in a file, by name."""

    path: Path
    taken: tuple[str, ...]
    """Are in the model now."""

    left: tuple[str, ...]
    """Are in the file, and have no place in the part of the model that was asked for."""

    missed: tuple[str, ...]
    """Are in that part of the model and not in the file, so they are as they were."""

    mismatched: tuple[str, ...]
    """Are in both with other shapes, so they are as they were; each with both shapes."""

    def summary(self) -> str:
        """Returns one line, in which many names of a kind stand as one."""
        parts = [f"{self.path}: {len(self.taken)} weights taken"]
        for word, names in (("left", self.left), ("missed", self.missed), ("of another shape", self.mismatched)):
            parts.append(f"{len(names)} {word}" + (f" ({abbreviated(names)})" if names else ""))
        return ", ".join(parts)


def load_weights(model: nn.Module, path: str | Path, parts: WeightParts = "all") -> WeightReport:
    """Puts the weights of a file into a model, in place, as far as names and shapes agree.

    Args:
        model: What `NestModel` builds.
        path: A `.nemo` file, a checkpoint of `nestmodel fit`, or a safetensors file.
        parts: Whether all of the model is filled, or the encoder alone.

    Raises:
        WeightsError: The file cannot be read, or no parameter of it fits.
    """
    path = Path(path)
    state = read_state(path)
    wanted = {name: value for name, value in model.state_dict().items() if parts == "all" or name.startswith(ENCODER)}
    fitting = [name for name, value in wanted.items() if name in state and state[name].shape == value.shape]
    unfit = {name: value for name, value in wanted.items() if name in state and state[name].shape != value.shape}
    report = WeightReport(
        path=path,
        taken=tuple(fitting),
        left=tuple(name for name in state if name not in wanted),
        missed=tuple(name for name in wanted if name not in state),
        mismatched=tuple(f"{name}: {_shape(state[name])} for {_shape(value)}" for name, value in unfit.items()),
    )
    # Window and filterbank have the same shapes in models of all sizes.
    if all(name.startswith(_FRONT_END) for name in fitting):
        raise WeightsError(f"{report.summary()}. Nothing of it fits the model: give another file, or change the model.")
    with torch.no_grad():
        for name in fitting:
            wanted[name].copy_(state[name])
    return report


def unlike_settings(config: NestConfig, path: str | Path) -> tuple[str, ...]:
    """Names the settings under which weights mean something else, where a file's differ from a model's.

    Such as `encoder.xscaling`, which no shape shows. Nothing where the file has no configuration that can be read.
    """
    try:
        theirs = asdict(read_config(path))
    except WeightsError:
        return ()
    ours = asdict(config)
    return tuple(
        f"{section}.{field} is {value!r} here and {theirs[section][field]!r} there"
        for section in ("features", "encoder")
        for field, value in ours[section].items()
        if field not in _HARMLESS and value != theirs[section][field]
    )


def load_whole(model: nn.Module, path: str | Path) -> None:
    """Puts the weights of a file into a model, in place, all of them.

    Raises:
        WeightsError: The file cannot be read, or it holds other weights than the model does.
    """
    report = load_weights(model, path)
    left = [name for name in report.left if not name.startswith(_UNUSED)]
    if not any(name.startswith(ENCODER) for name in (*report.missed, *report.mismatched, *left)) and report.missed:
        raise WeightsError(
            f"{path}: holds the encoder and not the whole model ({abbreviated(report.missed)} missing). "
            "Start a model from it: --model.init_from with --model.init_parts encoder."
        )
    if left or report.missed or report.mismatched:
        raise WeightsError(f"{report.summary()}. The weights are not those of the configuration in the file.")


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Returns the weights of a file under our names, on the CPU, in the precision that they are stored in.

    Raises:
        WeightsError: The file cannot be read.
    """
    path = Path(path)
    kind = kind_of(path)
    with _explained(path):
        if kind == "nemo":
            return read_nemo_state(path)
        if kind == "checkpoint":
            return _checked_state(_read_checkpoint(path)["state_dict"], path)
        return read_tensors(path)


def read_config(path: str | Path) -> NestConfig:
    """Returns the configuration of the model that a file holds, or whose encoder it holds.

    Raises:
        WeightsError: The file cannot be read, holds no configuration, or one that is not implemented here.
    """
    path = Path(path)
    kind = kind_of(path)
    with _explained(path):
        if kind == "nemo":
            return read_nemo_config(path)
        if kind == "checkpoint":
            return NestConfig.from_dict(_read_checkpoint(path)[CONFIG_KEY])
        return NestConfig.from_dict(json.loads(read_metadata(path)[CONFIG_KEY]))


def kind_of(path: Path) -> Literal["nemo", "checkpoint", "safetensors"]:
    """Tells what a file is by its first bytes.

    Raises:
        WeightsError: It does not exist, or is none of these.
    """
    try:
        # The tar first: it ends with a zip, which `is_zipfile` would find.
        if tarfile.is_tarfile(path):
            return "nemo"
        with path.open("rb") as file:
            start = file.read(9)
        if start.endswith(b"{") and int.from_bytes(start[:8], "little") <= path.stat().st_size:
            return "safetensors"
        if zipfile.is_zipfile(path):
            return "checkpoint"
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Give a file that exists.") from error
    raise WeightsError(
        f"{path}: neither a .nemo file, a checkpoint of nestmodel nor safetensors, or a damaged one. "
        "Give one of these, and look whether it was copied whole."
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns whatever a damaged or foreign file raises into one WeightsError that names the file."""
    try:
        yield
    except WeightsError:
        raise
    except NestModelError as error:
        raise WeightsError(f"{path}: {error}") from error
    except KeyError as error:
        raise WeightsError(f"{path}: holds no {error.args[0]}. Give a file of a whole NEST model.") from error
    except _BROKEN as error:
        kind = type(error).__name__
        raise WeightsError(f"{path}: cannot be read ({kind}). Make or copy the file again.") from error


def _checked_state(state: object, path: Path) -> dict[str, Tensor]:
    """Returns weights as they were read from a pickle, if that is what they are."""
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"{path}: holds something else than named weights. Give a file of a NEST model.")
    return dict(state)


def abbreviated(names: Iterable[str], most: int = 4) -> str:
    """Names few weights, and of many the modules that they are of: `decoder_ssl.* 2, encoder.layers.16.* 39`."""
    names = list(names)
    if len(names) > most:
        modules = Counter(_module_of(name) for name in names)
        names = [f"{module}.* {number}" for module, number in modules.items()]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _module_of(name: str) -> str:
    parts = name.split(".")
    depth = 3 if parts[:2] == ["encoder", "layers"] else 2 if parts[0] == "encoder" else 1
    return ".".join(parts[:depth])


def _read_checkpoint(path: Path) -> dict[str, Any]:
    # Mapped, so that the state of the optimizer, twice as large as the weights, is not read.
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(checkpoint, dict):
        raise WeightsError(f"{path}: not a checkpoint of nestmodel. Give one of `nestmodel fit`.")
    return checkpoint


def _shape(value: Tensor) -> str:
    return " x ".join(map(str, value.shape)) or "one number"
