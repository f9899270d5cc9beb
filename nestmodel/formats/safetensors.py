"""Files of named tensors in the safetensors format: read and written whole, with their metadata.

Owns the one place where the package is needed, which is an extra. Leaves the meaning of names and metadata to others.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from nestmodel.errors import ConfigError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a file, on the CPU.

    Raises:
        ConfigError: The package is not installed.
        OSError: The file is damaged, or cannot be read.
    """
    with _as_os_errors():
        from safetensors.torch import load_file

        return load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Returns what a file says of itself; nothing where it says nothing. Raises what `read_tensors` does."""
    with _as_os_errors():
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors that share no memory, and text that describes them.

    Raises:
        ConfigError: The package is not installed.
        OSError: It cannot be written.
    """
    with _as_os_errors():
        from safetensors.torch import save_file

        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        path.touch()
        mode = path.stat().st_mode
        # transformers asks for the format.
        save_file(plain, path, metadata={"format": "pt", **metadata})
        path.chmod(mode)  # the package makes files that nobody else can read


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        from safetensors import SafetensorError
    except ImportError as error:
        raise ConfigError("safetensors is not installed: pip install 'nest-pretrain[safetensors]'.") from error
    try:
        yield
    except SafetensorError as error:
        raise OSError(" ".join(str(error).split())) from error
