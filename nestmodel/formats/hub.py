"""Model files of repositories on the Hugging Face hub: `hf://owner/name`, `hf://owner/name@revision/file`.

The package `huggingface_hub`, an optional extra, finds and downloads one file, which stays in its cache. This module
checks the name before it is used, and chooses the file.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nestmodel.errors import ConfigError, WeightsError

# `Path` removes one of the two slashes.
_SCHEME = re.compile(r"hf:/{1,2}")
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_FILE = rf"(?:{_WORD}/)*{_WORD}"
_NAME = re.compile(rf"(?P<owner>{_WORD})/(?P<name>{_WORD})(?:@(?P<revision>{_WORD}))?(?:/(?P<file>{_FILE}))?")
_SUFFIXES = (".nemo", ".ckpt", ".safetensors")
"""Kinds of model files, the preferred one first."""

_MAX_NAMES_SHOWN = 4

HUB = "on the Hugging Face hub"
"""End of the text of a `HubModel`."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the hub, and perhaps a revision and a file of it."""

    owner: str
    name: str
    revision: str | None = None
    """A branch, a tag or a commit; None for the default branch."""

    file: str | None = None
    """Path of the file in the repository; None if it has to be found."""

    @property
    def repository(self) -> str:
        """Owner and name."""
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        revision = f" at {self.revision}" if self.revision else ""
        return f"{self.repository}{revision} {HUB}"


def is_on_hub(path: str | Path) -> bool:
    """Returns whether a path is the name of a model on the hub."""
    return _SCHEME.match(str(path)) is not None


def parse_hub_name(path: str | Path) -> HubModel:
    """Parses `hf://owner/name`, with `@revision` and `/file` if they are given.

    Raises:
        WeightsError: The name has another form.
    """
    text = _SCHEME.sub("", str(path), count=1)
    match = _NAME.fullmatch(text)
    if match is None:
        raise WeightsError(
            f"{text[:200]!r} is not the name of a model on the Hugging Face hub. Give hf://OWNER/NAME, and if needed "
            "a revision and a file: hf://OWNER/NAME@REVISION/FILE."
        )
    return HubModel(**match.groupdict())


def fetch_from_hub(model: HubModel) -> tuple[Path, HubModel]:
    """Downloads the model file of a repository, unless it is in the cache of `huggingface_hub`.

    Without a connection, a file that was downloaded before is taken from the cache.

    Returns:
        The path of the file in the cache, and its name, with the commit as its revision.

    Raises:
        ConfigError: `huggingface_hub` is not installed.
        WeightsError: It cannot be downloaded, or more than one file could be meant.
    """
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ConfigError("hf:// names need huggingface_hub: pip install 'nest-pretrain[hub]'.") from error
    where: dict[str, Any] = {"repo_id": model.repository, "revision": model.revision}
    try:
        try:
            found = hub.HfApi().model_info(**where, timeout=20)
            names, commit = [sibling.rfilename for sibling in found.siblings or ()], found.sha or model.revision
        except Exception:  # raised by the client or by its transport, depending on the release
            folder = Path(hub.snapshot_download(**where, local_files_only=True))
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            commit = model.revision
        file = model.file or _the_model_file(names, model)
        path = hub.hf_hub_download(model.repository, file, revision=commit)
    except WeightsError:
        raise
    except Exception as error:
        cause = error.__context__ or error
        reason = " ".join(str(cause).split())[:200].rstrip(".") or type(cause).__name__
        raise WeightsError(
            f"{model}: cannot be downloaded, and is not in the cache ({reason}). Check the name and the network; for a "
            "private or restricted model, accept its terms on its page and log in with `hf auth login`."
        ) from error
    return Path(path), replace(model, revision=commit, file=file)


def _the_model_file(names: Iterable[str], model: HubModel) -> str:
    """Returns the name of the one model file among the files of a repository, or raises WeightsError."""
    usable = sorted(name for name in names if re.fullmatch(_FILE, name))
    for suffix in _SUFFIXES:
        found = [name for name in usable if name.endswith(suffix)]
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(found[:_MAX_NAMES_SHOWN]) + (", ..." if len(found) > _MAX_NAMES_SHOWN else "")
            raise WeightsError(
                f"{model}: has {len(found)} {suffix} files ({shown}). Name one: "
                f"hf://OWNER/NAME/{found[0]} with this owner and name."
            )
    raise WeightsError(f"{model}: has no {', '.join(_SUFFIXES)} file. Give a repository with a NEST model.")
