"""Reading model files: NeMo archives, checkpoints of `nestmodel fit` and of NeMo, safetensors, on disk or on a hub.

The kind of a file is detected once, from its content and not from its name. Configuration and weights are read when
they are asked for. No file can run code while it is read, and a damaged file raises an error that names it.
"""

import json
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import yaml
from torch import Tensor

from nestdata import NestError
from nestdata.wrong_path import kind_of, wrong_path
from nestmodel.config import NestConfig
from nestmodel.config_files import check_size
from nestmodel.errors import WeightsError
from nestmodel.formats.hub import fetch_from_hub, is_on_hub, parse_hub_name
from nestmodel.formats.huggingface import WEIGHTS_FILE, is_huggingface
from nestmodel.formats.huggingface import our_names as names_from_huggingface
from nestmodel.formats.nemo_archive import config_of_section, read_nemo_config, read_nemo_state
from nestmodel.formats.nemo_archive import our_names as names_from_nemo
from nestmodel.formats.nemo_checkpoint import load_checkpoint, nemo_section
from nestmodel.formats.safetensors import CONFIG_KEY, read_metadata, read_tensors

ModelFileKind = Literal["nemo", "nemo-checkpoint", "checkpoint", "safetensors"]
# Errors that torch, tarfile, zlib and yaml raise for a file that is damaged or of another kind.
_READ_ERRORS = (
    *(OSError, EOFError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile),
    *(tarfile.TarError, zlib.error, lzma.LZMAError, yaml.YAMLError),
    # Torch's pickle reader raises these for some damaged files.
    *(AssertionError, AttributeError, IndexError, TypeError),
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An open model file."""

    path: Path
    kind: ModelFileKind
    source: str
    """Where the file is from: its path, or its name on the hub."""

    _read_config: Callable[[], NestConfig]
    _read_state: Callable[[], object]
    _entries: Mapping[str, Any]

    def entry(self, key: str) -> Any:
        """Returns the value of a key of a checkpoint other than configuration and weights; None without such a key.

        The value is plain and of bounded size, but may have any type: the file is not trusted.

        Raises:
            WeightsError: It has too many parts.
        """
        value = self._entries.get(key)
        with _as_weights_error(self.path):
            check_size(value, key)
        return value

    def read_config(self) -> NestConfig:
        """Returns the configuration of the model, or of the model whose encoder the file holds.

        Raises:
            WeightsError: The file is damaged, holds no configuration, or uses a setting that is not implemented.
        """
        with _as_weights_error(self.path):
            return self._read_config()

    def read_state(self) -> dict[str, Tensor]:
        """Returns the weights under our names, on the CPU, in the precision they are stored in.

        Raises:
            WeightsError: The file is damaged, or holds no weights.
        """
        with _as_weights_error(self.path):
            state = self._read_state()
            if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
                raise WeightsError(
                    f"{self.path}: its weights are not a mapping of names to tensors. Give a file of a NEST model."
                )
            return names_from_nemo(names_from_huggingface(state))


@contextmanager
def open_model_file(path: str | Path) -> Iterator[ModelFile]:
    """Opens a model file. Configuration and weights are read only on request.

    Args:
        path: A path, of a file or of a folder that `nestmodel export --to huggingface` has written; or the name of a
            model on the Hugging Face hub, `hf://owner/name`, which is downloaded.

    Raises:
        ConfigError: The package that downloads models is not installed.
        WeightsError: The file does not exist, is of an unknown kind, is damaged, or cannot be downloaded.
    """
    source = str(path)
    if is_on_hub(path):
        path, model = fetch_from_hub(parse_hub_name(path))
        source = str(model)
    path = Path(path)
    if is_huggingface(path):
        path = path / WEIGHTS_FILE
    with ExitStack() as stack:
        file, kind = _open(path, stack)
        with _as_weights_error(path):
            entries: Mapping[str, Any] = {}
            if kind == "nemo":
                tar = stack.enter_context(tarfile.open(fileobj=file))
                readers: tuple[Any, Any] = partial(read_nemo_config, tar, path), partial(read_nemo_state, tar, path)
            elif kind == "checkpoint":
                entries = load_checkpoint(path)
                section = None if CONFIG_KEY in entries else nemo_section(entries)
                kind = "checkpoint" if section is None else "nemo-checkpoint"
                readers = partial(_config_of, entries, section, path), partial(entries.__getitem__, "state_dict")
            else:
                readers = partial(_config_of_tensors, path), partial(read_tensors, path)
        yield ModelFile(path, kind, source, *readers, entries)


def read_config(path: str | Path) -> NestConfig:
    """Returns the configuration of the model that a file holds, or whose encoder it holds.

    Raises:
        WeightsError: The file cannot be read, holds no configuration, or uses a setting that is not implemented.
        ConfigError: The name is one of the hub, and the extra `hub` is not installed.
    """
    with open_model_file(path) as file:
        return file.read_config()


def _open(path: Path, stack: ExitStack) -> tuple[BinaryIO, ModelFileKind]:
    """Opens a file and detects its kind from its content."""
    try:
        file = stack.enter_context(path.open("rb"))
        # Tar first: a NeMo archive ends with a zip file, which `is_zipfile` would find.
        if tarfile.is_tarfile(file):
            return _rewound(file), "nemo"
        start = _rewound(file).read(9)
        if start.endswith(b"{") and int.from_bytes(start[:8], "little") <= path.stat().st_size:
            return file, "safetensors"
        with suppress(zipfile.BadZipFile):  # raised for some damaged files
            if zipfile.is_zipfile(file):
                return file, "checkpoint"
    except (FileNotFoundError, IsADirectoryError) as error:
        raise WeightsError(f"{path}: {wrong_path(path, 'a model')}") from error
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Give a file that exists.") from error
    if kind_of(path) not in ("a model file", "a file"):
        raise WeightsError(f"{path}: {wrong_path(path, 'a model')}")
    raise WeightsError(
        f"{path}: neither a .nemo file, a checkpoint of nestmodel nor safetensors, or damaged. "
        "Give one of these, and check that it was copied completely; ONNX files are not read back."
    )


def _rewound(file: BinaryIO) -> BinaryIO:
    file.seek(0)
    return file


@contextmanager
def _as_weights_error(path: Path) -> Iterator[None]:
    """Turns every error that a damaged or foreign file can cause into a WeightsError that names the file."""
    try:
        yield
    except WeightsError:
        raise
    except NestError as error:
        raise WeightsError(f"{path}: {error}") from error
    except KeyError as error:
        raise WeightsError(f"{path}: holds no {error.args[0]}. Give a file of a whole NEST model.") from error
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path}: damaged, or holds other objects than tensors and plain values, which are not loaded because they "
            "could run code. Give a file of `nestmodel`; convert a checkpoint of NeMo to a .nemo file, in NeMo with "
            "`Model.load_from_checkpoint(FILE).save_to('model.nemo')`."
        ) from error
    except _READ_ERRORS as error:
        kind = type(error).__name__
        raise WeightsError(f"{path}: cannot be read ({kind}). Export or copy the file again.") from error


def _config_of(checkpoint: Mapping[str, Any], section: Mapping[str, Any] | None, path: Path) -> NestConfig:
    """Returns the configuration; `section` is given for a checkpoint of NeMo."""
    return NestConfig.from_dict(checkpoint[CONFIG_KEY]) if section is None else config_of_section(section, path)


def _config_of_tensors(path: Path) -> NestConfig:
    return NestConfig.from_dict(json.loads(read_metadata(path)[CONFIG_KEY]))
