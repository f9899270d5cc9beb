"""NeMo's files: a tar of `model_config.yaml` and `model_weights.ckpt`, read and written without NeMo.

Owns the layout of the file, and the two places where NeMo's names of weights differ from ours: a model that masks after
the subsampling wraps it. Leaves the configuration to `nemo` and the words for damaged files to `weights`. A file that
is written opens with `EncDecDenoiseMaskedTokenPredModel.restore_from` of NeMo 3.0.0.
"""

import io
import logging
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError, WeightsError
from nestmodel.formats.nemo_config import config_to_nemo

CONFIG_MEMBER = "model_config.yaml"
WEIGHTS_MEMBER = "model_weights.ckpt"
_WRAPPED = "encoder.pre_encode.pre_encode."
_UNWRAPPED = "encoder.pre_encode."
_SUBSAMPLING_AGAIN = "pre_encoder.pre_encode."
_MASK_AGAIN = ("encoder.pre_encode.masking.mask_embedding", "pre_encoder.masking.mask_embedding")
_MASK = "mask_processor.mask_embedding"

_logger = logging.getLogger(__name__)


def read_nemo_config(path: Path) -> NestConfig:
    """Reads the configuration of a `.nemo` file.

    Where encoder frames are masked, NeMo stores a block size that it has divided by the subsampling factor, and divides
    it again whenever it opens the file. Here it is multiplied again once; a remainder that the division lost has no
    effect. NeMo has no counterpart of `seed` and `encoder.checkpoint_activations`, which get their defaults.

    Raises:
        ConfigError: It asks for something that is not implemented here. An optimizer or schedule that is not makes no
            difference to what the model computes: the default stands in for it, with a warning.
        WeightsError: There is none in the file.
        OSError, TarError, YAMLError: The file is damaged.
    """
    with tarfile.open(path) as tar:
        file = tar.extractfile(_member(tar, CONFIG_MEMBER, path))
        assert file is not None
        section = yaml.safe_load(file)
    section = section.get("model", section) if isinstance(section, Mapping) else section
    if not isinstance(section, Mapping):
        raise WeightsError(f"{path}: its {CONFIG_MEMBER} holds no settings. Make the file again.")
    section = _with_whole_blocks(section)
    without_optimizer = {key: value for key, value in section.items() if key != "optim"}
    config = NestConfig.from_nemo(without_optimizer)
    try:
        return NestConfig.from_nemo(section)
    except ConfigError as error:
        _logger.warning("%s: its optimizer is not taken over. %s", path, error)
        return config


def read_nemo_state(path: Path) -> dict[str, Tensor]:
    """Reads the weights of a `.nemo` file under our names, in the precision that they are stored in.

    Raises:
        WeightsError: There are none in the file.
        OSError, RuntimeError, TarError, UnpicklingError: The file is damaged.
    """
    with tarfile.open(path) as tar, tempfile.TemporaryFile() as unpacked:
        file = tar.extractfile(_member(tar, WEIGHTS_MEMBER, path))
        assert file is not None
        is_compressed = _is_compressed(tar)
        if is_compressed:
            # For each step back, and torch makes many, it would be decompressed all over again.
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
        state = torch.load(unpacked if is_compressed else file, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"{path}: its {WEIGHTS_MEMBER} holds something else than weights. Make the file again.")
    # What stands there a second time, under the name of the wrapper, is left out.
    again = (_SUBSAMPLING_AGAIN, *_MASK_AGAIN)
    return {name.replace(_WRAPPED, _UNWRAPPED): value for name, value in state.items() if not name.startswith(again)}


def write_nemo(path: Path, config: NestConfig, state: Mapping[str, Tensor]) -> None:
    """Writes a `.nemo` file of a whole model.

    Raises:
        OSError: It cannot be written.
    """
    section = yaml.safe_dump(config_to_nemo(config), sort_keys=False).encode()
    named = dict(state) if config.masking.position == "pre_conv" else _wrapped(state)
    with tempfile.NamedTemporaryFile(dir=path.parent) as weights:
        torch.save({name: value.detach().cpu().contiguous() for name, value in named.items()}, weights)
        weights.flush()
        weights.seek(0)
        with tarfile.open(path, "w") as tar:
            for name, file, size in (
                (CONFIG_MEMBER, io.BytesIO(section), len(section)),
                (WEIGHTS_MEMBER, weights, Path(weights.name).stat().st_size),
            ):
                member = tarfile.TarInfo(f"./{name}")
                member.size, member.mode = size, 0o644
                tar.addfile(member, file)


def _member(tar: tarfile.TarFile, name: str, path: Path) -> tarfile.TarInfo:
    for member in tar:
        if member.isfile() and member.name.removeprefix("./") == name:
            if not _is_compressed(tar) and member.offset_data + member.size > path.stat().st_size:
                raise tarfile.ReadError("unexpected end of data")  # which torch does not report as such
            return member
    raise WeightsError(f"{path}: a tar without {name}, so no file of NeMo's. Give a .nemo file.")


def _is_compressed(tar: tarfile.TarFile) -> bool:
    return not isinstance(tar.fileobj, io.BufferedReader)


def _with_whole_blocks(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undoes what NeMo does to the block size of a model that masks encoder frames."""
    loss, masking, encoder = (section.get(key) for key in ("loss", "masking", "encoder"))
    if not (isinstance(loss, Mapping) and isinstance(masking, Mapping) and isinstance(encoder, Mapping)):
        return section  # which is refused by name, later
    # NeMo sets this to 1 where it divides, and no file that it has not opened holds that: see `config_to_nemo`.
    is_divided = section.get("mask_position") == "post_conv" and loss.get("combine_time_steps", 1) == 1
    factor, block_size = encoder.get("subsampling_factor", 4), masking.get("block_size", 48)
    if not (is_divided and isinstance(factor, int) and isinstance(block_size, int)):
        return section
    return {**section, "masking": {**masking, "block_size": block_size * factor}}


def _wrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """NeMo's names of a model that masks encoder frames: a wrapper holds the subsampling, and is held twice."""
    named = {name.replace(_UNWRAPPED, _WRAPPED, 1): value for name, value in state.items()}
    for name, value in state.items():
        if name.startswith(_UNWRAPPED):
            named[_SUBSAMPLING_AGAIN + name.removeprefix(_UNWRAPPED)] = value
    return {**named, **dict.fromkeys(_MASK_AGAIN, state[_MASK])}
