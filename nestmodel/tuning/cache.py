"""Results of races, kept in a file in the user's cache directory.

The file is not trusted: what does not have the expected form is ignored with a warning. A file that cannot be read or
written never ends a run.
"""

import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch

from nestmodel.errors import ConfigError
from nestmodel.nn.gpu.kernel_choice import Kernels, kernels_of
from nestmodel.source_digest import source_digest
from nestmodel.tuning.parts import FORMS, Setting
from nestmodel.tuning.race import Row, Verdict

_FILE = "kernels.json"
_MAX_BYTES = 2**22
"""A larger file is not read."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a race."""

    device: str
    """Name of the device."""

    kernels: Kernels
    """The form that is taken of each part."""

    rows: tuple[Row, ...]
    """One row for each form that was raced."""


def cache_path() -> Path:
    """Returns the file of the cache: in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # Source: XDG Base Directory Specification, which ignores relative paths.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "nestmodel" / _FILE


def cache_key(setting: Setting, device: str, determinism: object, parts: Sequence[str], given: Kernels) -> str:
    """Returns a hash of all that decides which forms are the fastest correct ones.

    Args:
        setting: Model, shape and precision.
        device: Name of the device.
        determinism: Whether torch uses deterministic algorithms.
        parts: The parts that are raced.
        given: The settings of the run: a whole step is raced in the forms that are set by hand.
    """
    versions = [torch.__version__, torch.version.cuda, _version("triton"), _version("nestmodel")]
    sizes = asdict(setting)
    for without_effect in ("seed", "optimizer"):
        del sizes["config"][without_effect]
    content = [
        sizes,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        device,
        repr(determinism),
        list(parts),
        asdict(given),
        versions,
        source_digest("nestmodel.nn"),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()


def read_result(key: str) -> Result | None:
    """Returns the result for a key; None if there is none. Warns if the file is damaged or cannot be read."""
    path = Path(_FILE)
    try:
        path = cache_path()
        entry = _read(path).get(key)
        return None if entry is None else _parse(entry)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError, RuntimeError) as error:  # RuntimeError: nested too deeply, or no home
        warnings.warn(f"{path}: ignored, because it is damaged or cannot be read ({error}).", stacklevel=2)
        return None


def write_result(key: str, result: Result) -> None:
    """Adds a result to the file; other results stay. Warns if the file cannot be written."""
    path = Path(_FILE)
    try:
        path = cache_path()
        try:
            entries = _read(path)
        except (ValueError, FileNotFoundError, RecursionError):
            entries = {}
        entries[key] = asdict(result)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_FILE)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(entries, file, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        warnings.warn(f"{path}: the choice of kernels is not kept for the next run ({error}).", stacklevel=2)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    entries = json.loads(content)
    if not isinstance(entries, dict):
        raise ValueError("it is not a JSON object")
    return entries


def _parse(entry: Any) -> Result:
    """Returns the result that an entry holds.

    Raises:
        ConfigError: A form is unknown.
        ValueError: The entry has another structure, or a form that no race takes.
    """
    if not isinstance(entry, dict) or entry.keys() != {field.name for field in fields(Result)}:
        raise ValueError("an entry has other fields")
    device, rows = entry["device"], entry["rows"]
    if not isinstance(device, str) or not isinstance(rows, list):
        raise ValueError("an entry has a field of another type")
    kernels = kernels_of(entry["kernels"])
    if not all(form in FORMS[part] for part, form in asdict(kernels).items()):
        raise ValueError("an entry has a form that cannot be raced")
    return Result(device=device, kernels=kernels, rows=tuple(map(_parse_row, rows)))


def _parse_row(row: Any) -> Row:
    if not isinstance(row, dict) or row.keys() != {field.name for field in fields(Row)}:
        raise ValueError("a row has other fields")
    texts = [row[name] for name in ("part", "form", "reason")]
    numbers = [row[name] for name in ("seconds", "error", "allowed")]
    are_numbers = all(number is None or type(number) is float for number in numbers)
    if not all(isinstance(text, str) for text in texts) or not are_numbers or row["verdict"] not in get_args(Verdict):
        raise ValueError("a row has a field of another type")
    return Row(**row)
