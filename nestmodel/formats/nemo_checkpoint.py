"""Training checkpoints that Lightning writes for NeMo, read without NeMo and without OmegaConf.

Their weights have the names of a NeMo archive. Their hyperparameters hold the configuration of the model as objects of
OmegaConf. torch's reader creates only objects of known classes. Classes of this module, which hold the values and have
no methods, take the place of OmegaConf's. So a file cannot run code.

Source: NeMo 3.0.0, core/classes/modelPT.py (`hparams`); Lightning 2.6, trainer/connectors/checkpoint_connector.py
(`dump_checkpoint`); OmegaConf 2.3 and 2.4, base.py, nodes.py.
"""

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import safe_globals

from nestmodel.errors import WeightsError

# A configuration has a few hundred values; if its parts contain each other, it would have any number.
_MAX_VALUES = 100_000


_checked: set[tuple[int, int, int, int]] = set()
"""The versions of files whose bytes were checked: device, inode, size and time."""


class _Object:
    """Replaces an object of OmegaConf, or the type of a value, which is not used."""


def _empty_dict(*_: object) -> dict[str, Any]:
    return {}


_STAND_INS: list[Any] = [
    *(
        (_Object, f"omegaconf.{name}")
        for name in (
            *("dictconfig.DictConfig", "listconfig.ListConfig", "base.Metadata", "base.ContainerMetadata"),
            *("nodes.AnyNode", "nodes.StringNode", "nodes.IntegerNode", "nodes.FloatNode", "nodes.BooleanNode"),
            *("nodes.BytesNode", "nodes.PathNode", "nodes.EnumNode", "nodes.UnionNode"),
            "nodes.InterpolationResultNode",
        )
    ),
    *((_Object, f"typing.{name}") for name in ("Any", "Dict", "List", "Union", "Optional")),
    *((_Object, f"builtins.{name}") for name in ("dict", "list", "int", "long", "str", "float", "bool")),
    (_empty_dict, "collections.defaultdict"),
]


def load_checkpoint(path: Path) -> Any:
    """Loads a checkpoint of `nestmodel` or of NeMo, without running code of the file.

    All bytes are checked at the first call for a file. The file is memory-mapped, so that the state of the optimizer,
    which is twice as large as the weights, is not kept in memory.

    Raises:
        WeightsError: The file is damaged.
        OSError, RuntimeError, UnpicklingError: The file is damaged, or holds other objects than tensors, plain values
            and configurations of OmegaConf.
    """
    with path.open("rb") as file:
        check_zip(file, path)
    with safe_globals(_STAND_INS):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def check_zip(file: io.BufferedIOBase | IO[bytes], path: Path) -> None:
    """Checks all bytes of a file of torch against the checksums in it, which torch itself does not check.

    Args:
        file: The open file.
        path: Its path, for messages.

    Raises:
        WeightsError: Bytes differ, or some are compressed, which torch never does.
        BadZipFile: It is not a zip file.
    """
    status = os.stat(path)
    version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if version in _checked:
        return
    with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise WeightsError(f"{path}: its content is compressed, so torch has not written it. Give another file.")
        damaged = archive.testzip()
    if damaged is not None:
        raise WeightsError(
            f"{path}: damaged: the checksum of {damaged[-60:]!r} does not match. Copy it again, or give another file."
        )
    _checked.add(version)


def nemo_section(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the configuration of the model in a checkpoint of NeMo; None for another checkpoint.

    Raises:
        ValueError: It has too many values.
    """
    parameters = _plain(checkpoint.get("hyper_parameters"), count())
    section = parameters.get("cfg") if isinstance(parameters, dict) else None
    return section if isinstance(section, dict) else None


def _plain(value: Any, numbers: Iterator[int]) -> Any:
    """Returns a value without the objects of OmegaConf; raises RecursionError if it contains itself.

    Args:
        value: Value of a checkpoint.
        numbers: Counts the parts.
    """
    if next(numbers) >= _MAX_VALUES:
        raise ValueError(f"a configuration of more than {_MAX_VALUES} values")
    if isinstance(value, _Object):  # a dict, a list, or a single value
        fields = vars(value)
        return _plain(fields["_content"] if "_content" in fields else fields.get("_val"), numbers)
    if isinstance(value, dict):
        return {key: _plain(item, numbers) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, numbers) for item in value]
    return value
