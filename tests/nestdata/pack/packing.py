"""Shar of real audio, and what is in it, for the tests of this folder."""

import gc
import hashlib
import warnings
from pathlib import Path
from typing import Any

from nestdata import Corpus, PackConfig, PackReport, pack_corpora

DEMO = Path(__file__).parents[3] / "manifests/demo"
# Three shards of the demo's speech.
SHARD_HOURS = 0.015


def pack(corpus: Path, output: Path | str, **options: Any) -> PackReport:
    """Packs a corpus into shards of `SHARD_HOURS`, unless options say otherwise."""
    names = {"codec", "shard_hours"}
    config = PackConfig(**{"shard_hours": SHARD_HOURS} | {name: options.pop(name) for name in names & options.keys()})
    return pack_corpora([corpus], output, config, **options)


def shar_of(folder: Path) -> dict[str, Any]:
    """Returns the cuts that Lhotse reads from a folder, by id."""
    from lhotse import CutSet

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Lhotse leaves the tar files to the garbage collector
        found = {cut.id: cut for cut in CutSet.from_shar(in_dir=folder)}
        gc.collect()
    return found


def digests(folder: Path) -> dict[str, str]:
    """Returns a hash of every file of a folder by its relative name."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def samples_by_id(*corpora: Path) -> dict[str, Any]:
    """Returns the samples of all cuts of corpora by their id."""
    opened = [Corpus.open(path) for path in corpora]
    return dict(corpus.load(index) for corpus in opened for index in range(len(corpus)))
