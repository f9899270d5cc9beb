"""Targets of nestmodel: files of models."""

import io
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from nestdata import NestError
from nestmodel import NestNetwork, load_network
from nestmodel.formats.model_file import open_model_file
from nestmodel.formats.nemo_archive import CONFIG_MEMBER, WEIGHTS_MEMBER, write_nemo
from nestmodel.formats.safetensors import CONFIG_KEY
from tests.fuzz.inputs import altered, mutated
from tests.fuzz.target import Target
from tests.training import tiny_config


@cache
def _network() -> NestNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NestNetwork(tiny_config())


def _written(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        return path.read_bytes()


@cache
def _nemo() -> bytes:
    return _written(lambda path: write_nemo(path, tiny_config(), _network().state_dict()))


@cache
def _checkpoint() -> bytes:
    content = {"state_dict": _network().state_dict(), CONFIG_KEY: asdict(tiny_config())}
    return _written(lambda path: torch.save(content, path))


@cache
def _nemo_members() -> tuple[dict[str, Any], bytes]:
    """Returns the configuration and the weights of an archive."""
    with tarfile.open(fileobj=io.BytesIO(_nemo())) as tar:
        files = {Path(member.name).name: tar.extractfile(member) for member in tar}
        config, weights = files[CONFIG_MEMBER], files[WEIGHTS_MEMBER]
        assert config is not None
        assert weights is not None
        return yaml.safe_load(config), weights.read()


def _with_config(config: bytes) -> bytes:
    """Returns an archive with another configuration."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in ((CONFIG_MEMBER, config), (WEIGHTS_MEMBER, _nemo_members()[1])):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _nemo_files() -> st.SearchStrategy[bytes]:
    config = _nemo_members()[0]
    changed = altered([config]).map(
        lambda section: yaml.safe_dump(section, allow_unicode=True).encode(errors="replace")
    )
    text = mutated(yaml.safe_dump(config).encode(), b"a: &a [x]\nb: &b [*a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n")
    return st.one_of(mutated(_nemo()), st.one_of(changed, text).map(_with_config))


def _checkpoints() -> st.SearchStrategy[bytes]:
    state = _network().state_dict()

    def saved(config: dict[str, Any]) -> bytes:
        file = io.BytesIO()
        torch.save({"state_dict": state, CONFIG_KEY: config}, file)
        return file.getvalue()

    return st.one_of(mutated(_checkpoint()), altered([asdict(tiny_config())]).map(saved))


def _load(content: bytes, folder: Path) -> bool:
    path = folder / "model"
    path.write_bytes(content)
    with open_model_file(path) as file:
        file.read_state()
    load_network(path)
    return True


MODEL_TARGETS: dict[str, Target] = {
    ".nemo": Target(_nemo_files, _load, (NestError,), num_tested=25),
    "checkpoint": Target(_checkpoints, _load, (NestError,), num_tested=25),
}
