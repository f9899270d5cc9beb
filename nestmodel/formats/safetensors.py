"""Reading and writing safetensors files: named tensors, with metadata.

This is the only module that imports the package `safetensors`, which is an optional extra. Other modules define the
meaning of names and metadata.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from nestmodel.errors import ConfigError

CONFIG_KEY = "nest_config"
"""Key of our configuration in a checkpoint and in the metadata of a safetensors file, where it is JSON."""

RECORD_KEY = "nest_training"
"""Key of the training record of a checkpoint, for the model card: texts by name."""

SETTINGS_KEY = "nest_settings"
"""Key of the settings of the run in a checkpoint: texts by dotted name."""


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a file, which may be empty.

    Raises:
        ConfigError: The package is not installed.
        OSError: The file is damaged, or cannot be read.
    """
    with _as_os_errors():
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a file, on the CPU; raises the same errors as `read_metadata`."""
    with _as_os_errors():
        from safetensors.torch import load_file

        return load_file(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors that share no memory, with metadata.

    Raises:
        ConfigError: The package is not installed.
        OSError: The file cannot be written.
    """
    with _as_os_errors():
        from safetensors.torch import save_file

        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        path.touch()
        mode = path.stat().st_mode
        # transformers requires the key "format".
        save_file(plain, path, metadata={"format": "pt", **metadata})
        path.chmod(mode)  # safetensors creates files that only their owner can read


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turns errors of the package into OSError, and its absence into a ConfigError with the install command."""
    try:
        from safetensors import SafetensorError
    except ImportError as error:
        raise ConfigError("safetensors is not installed: pip install 'nest-pretrain[safetensors]'.") from error
    try:
        yield
    except SafetensorError as error:
        raise OSError(" ".join(str(error).split())) from error
