"""NeMo archives: tar files of `model_config.yaml` and `model_weights.ckpt`, read and written without NeMo.

This module defines the layout of the archive and translates the names of weights, which differ from ours only in models
that mask encoder frames: there NeMo wraps the subsampling. `nemo_config` translates the configuration, and `model_file`
reports damaged files. Archives written here can be opened with `EncDecDenoiseMaskedTokenPredModel.restore_from` of
NeMo 3.0.0.
"""

import io
import logging
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nestmodel.config import NestConfig
from nestmodel.config_files import read_yaml
from nestmodel.errors import ConfigError, WeightsError
from nestmodel.formats.nemo_checkpoint import check_zip
from nestmodel.formats.nemo_config import config_from_nemo, config_to_nemo, is_nest_v2

CONFIG_MEMBER = "model_config.yaml"
WEIGHTS_MEMBER = "model_weights.ckpt"
_MAX_CONFIG_BYTES = 10 << 20
# An archive may be at most this many times smaller than its content: weights in float32 hardly compress.
_MAX_COMPRESSION = 20
_WRAPPED = "encoder.pre_encode.pre_encode."
_UNWRAPPED = "encoder.pre_encode."
_MASK = "mask_processor.mask_embedding"
# NeMo stores the subsampling and the mask embedding of a wrapped model more than once.
_SUBSAMPLING_COPY = "pre_encoder.pre_encode."
_MASK_COPIES = ("encoder.pre_encode.masking.mask_embedding", "pre_encoder.masking.mask_embedding")

_logger = logging.getLogger(__name__)


def read_nemo_config(tar: tarfile.TarFile, path: Path) -> NestConfig:
    """Reads the configuration of a `.nemo` file; see `config_of_section`.

    Args:
        tar: The open archive.
        path: Its path, for messages.

    Raises:
        ConfigError: The model has a setting that is not implemented here.
        WeightsError: The archive holds no configuration.
        OSError, TarError, YAMLError: The file is damaged.
    """
    section = read_yaml(_open_member(tar, CONFIG_MEMBER, path).read())
    section = section.get("model", section) if isinstance(section, Mapping) else section
    if not isinstance(section, Mapping):
        raise WeightsError(f"{path}: its {CONFIG_MEMBER} is not a mapping. Export the file again.")
    return config_of_section(section, path)


def config_of_section(section: Mapping[str, Any], path: Path) -> NestConfig:
    """Translates the configuration that NeMo has stored with a model.

    In models that mask encoder frames, NeMo divides the block size by the subsampling factor, stores the result, and
    divides it again whenever it opens the file. Here the stored value is multiplied by the factor once; the remainder
    that the division lost has no effect. Settings without a counterpart in NeMo get their defaults; `config_to_nemo`
    lists them. An optimizer or schedule that is not implemented here is replaced by the default with a warning, because
    it does not change what the model computes. The same holds for `quantizer.input_norm`, which only decides what is
    learned. If the section does not say whether it has a norm, `input_norm` is null; if it does not say which norm,
    `input_norm` is `frames`; both with a warning.

    Args:
        section: The `model` section.
        path: Path of the file, for messages.

    Raises:
        ConfigError: The model has a setting that is not implemented here.
    """
    section = _with_whole_blocks(section)
    without_optimizer = {key: value for key, value in section.items() if key != "optim"}
    config = config_from_nemo(without_optimizer)
    is_v2 = is_nest_v2(section)
    if is_v2 is None:
        _logger.warning(
            "%s: a configuration of NeMo %s does not tell whether the model is NEST v2: quantizer.input_norm is null. "
            "To train such a model further, give `--config v2` after the size.",
            path,
            section["nemo_version"],
        )
    # Files of this package have no version. If encoder frames are masked, each is quantized by itself, and both norms
    # are the same.
    elif is_v2 and "nemo_version" in section and config.masking.position == "pre_conv":
        _logger.warning(
            "%s: the model is NEST v2, of which NeMo had two states: one normalises each frame, the other the stacked "
            "frames of a token. A configuration does not tell which: quantizer.input_norm is frames. If it was the "
            "other, train the model further with --model.config.quantizer.input-norm stacked.",
            path,
        )
    try:
        return config_from_nemo(section)
    except ConfigError as error:
        _logger.warning("%s: the default optimizer is used. %s", path, error)
        return config


def read_nemo_state(tar: tarfile.TarFile, path: Path) -> object:
    """Returns the content of the weights of a `.nemo` file; see `our_names`.

    Args:
        tar: The open archive.
        path: Its path, for messages.

    Raises:
        WeightsError: The archive holds no weights, or they are damaged.
        OSError, RuntimeError, TarError, UnpicklingError: The file is damaged.
    """
    file = _open_member(tar, WEIGHTS_MEMBER, path)
    with tempfile.TemporaryFile() as unpacked:
        is_compressed = _is_compressed(tar)
        if is_compressed:
            # Torch seeks backwards often, and each time a compressed file is decompressed again from its start.
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
        weights = unpacked if is_compressed else file
        if zipfile.is_zipfile(weights):  # old versions of torch wrote another form
            check_zip(weights, path)
        weights.seek(0)
        return torch.load(weights, map_location="cpu", weights_only=True)


def our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of NeMo under our names, without those that NeMo stores more than once."""
    copies = (_SUBSAMPLING_COPY, *_MASK_COPIES)
    return {name.replace(_WRAPPED, _UNWRAPPED): value for name, value in state.items() if not name.startswith(copies)}


def write_nemo(path: Path, config: NestConfig, state: Mapping[str, Tensor]) -> None:
    """Writes a `.nemo` file of a whole model.

    Raises:
        OSError: The file cannot be written.
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


def _open_member(tar: tarfile.TarFile, name: str, path: Path) -> io.BufferedReader:
    limit = _MAX_COMPRESSION * path.stat().st_size + _MAX_CONFIG_BYTES
    for member in tar:
        # Otherwise, a small archive could fill the disk, or take hours to read.
        is_config = member.name.removeprefix("./") == CONFIG_MEMBER
        if member.offset_data + member.size > limit or (is_config and member.size > _MAX_CONFIG_BYTES):
            raise WeightsError(
                f"{path}: {member.name[:100]!r} has {member.size:,} bytes, more than a model of this size can have. "
                "Give another file."
            )
        if member.isfile() and member.name.removeprefix("./") == name:
            if not _is_compressed(tar) and member.offset_data + member.size > path.stat().st_size:
                raise tarfile.ReadError("unexpected end of data")  # torch would report something else
            file = tar.extractfile(member)
            assert isinstance(file, io.BufferedReader)
            return file
    raise WeightsError(f"{path}: a tar file without {name}, so not a NeMo archive. Give a .nemo file.")


def _is_compressed(tar: tarfile.TarFile) -> bool:
    return not isinstance(tar.fileobj, io.BufferedReader)


def _with_whole_blocks(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undoes the division of the block size in a section that NeMo has stored; see `config_of_section`."""
    loss, masking, encoder = (section.get(key) for key in ("loss", "masking", "encoder"))
    if not (isinstance(loss, Mapping) and isinstance(masking, Mapping) and isinstance(encoder, Mapping)):
        return section  # `config_from_nemo` rejects it with a message
    # NeMo sets combine_time_steps to 1 when it divides. Sections that NeMo has not opened hold another value; see
    # `config_to_nemo`.
    is_divided = section.get("mask_position") == "post_conv" and loss.get("combine_time_steps", 1) == 1
    factor, block_size = encoder.get("subsampling_factor", 4), masking.get("block_size", 48)
    if not (is_divided and isinstance(factor, int) and isinstance(block_size, int)):
        return section
    return {**section, "masking": {**masking, "block_size": block_size * factor}}


def _wrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a model that masks encoder frames under NeMo's names, including the copies."""
    named = {name.replace(_UNWRAPPED, _WRAPPED, 1): value for name, value in state.items()}
    for name, value in state.items():
        if name.startswith(_UNWRAPPED):
            named[_SUBSAMPLING_COPY + name.removeprefix(_UNWRAPPED)] = value
    return {**named, **dict.fromkeys(_MASK_COPIES, state[_MASK])}
