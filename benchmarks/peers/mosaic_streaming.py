"""MosaicML Streaming on the speech of the benchmark `remote`, which runs it: writing, speed, resume and order.

Runs in an environment with `mosaicml-streaming`, `soundfile` and torch. Prints JSON.
"""

import argparse
import io
import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from steady import utterances_per_s
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.shuffle import get_shuffle
from streaming.base.util import clean_stale_shared_memory

warnings.filterwarnings("ignore")
BATCH = 16
SAMPLES_PER_SHARD = 335
"""Utterances of 200 KB in a shard of the default size, 64 MiB."""


class Speech(StreamingDataset):  # type: ignore[misc]  # not typed
    """Decodes FLAC; everything else is the default of the library."""

    decode = True

    def __getitem__(self, index: int) -> Any:
        """Returns the id and the samples of an utterance."""
        row = super().__getitem__(index)
        if not self.decode:
            return row["id"], np.zeros(1, np.float32)
        return row["id"], soundfile.read(io.BytesIO(row["flac"]), dtype="float32")[0]


def collate(rows: list[tuple[str, Any]]) -> tuple[list[str], torch.Tensor]:
    """Pads the utterances of a batch with zeros."""
    padded = torch.zeros(len(rows), max(len(samples) for _, samples in rows))
    for row, (_, samples) in zip(padded, rows, strict=True):
        row[: len(samples)] = torch.from_numpy(samples)
    return [name for name, _ in rows], padded


def main() -> int:
    """Does one thing and prints what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "speed", "resume", "order"])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--remote", help="URL of the data; the directory is then emptied and used as the cache")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-batches", type=int, default=160)
    parser.add_argument("--utterances", type=int, default=200_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "order":
        print(json.dumps(_orders(arguments.utterances)))
    elif arguments.what == "write":
        _write(arguments.manifest, arguments.directory)
    else:
        clean_stale_shared_memory()
        measure = _speed if arguments.what == "speed" else _resume
        print(json.dumps(measure(arguments)))
    return 0


def _write(manifest: Path, directory: Path) -> None:
    rows = [json.loads(line) for line in manifest.open()]
    with MDSWriter(out=str(directory), columns={"id": "str", "flac": "bytes"}) as writer:
        for row in rows:
            path = Path(manifest.parent, row["audio_filepath"])
            writer.write({"id": path.stem, "flac": path.read_bytes()})


def _loader(
    arguments: argparse.Namespace, *, decode: bool = True, epoch_size: int | None = None
) -> StreamingDataLoader:
    local = arguments.directory
    if arguments.remote:
        shutil.rmtree(local, ignore_errors=True)
    dataset = Speech(local=str(local), remote=arguments.remote, shuffle=True, batch_size=BATCH, epoch_size=epoch_size)
    dataset.decode = decode
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=arguments.workers, collate_fn=collate)


def _speed(arguments: argparse.Namespace) -> dict[str, float]:
    """Reads the utterances at least twice without a pause, as ours are read; once if the cache is empty at first."""
    epoch_size = None
    if not arguments.remote:
        index = json.loads((arguments.directory / "index.json").read_text())
        epoch_size = max(arguments.min_batches * BATCH, 2 * sum(shard["samples"] for shard in index["shards"]))
    loader = _loader(arguments, epoch_size=epoch_size)
    return {"utterances_per_s": utterances_per_s((len(names) for names, _ in loader), len(loader))}


def _resume(arguments: argparse.Namespace) -> dict[str, float]:
    """Stops in the middle of an epoch, and measures the time to the next batch of a new loader."""
    loader = _loader(arguments, decode=False)
    batches = iter(loader)
    for _ in range(len(loader) // 2):
        next(batches)
    state = loader.state_dict()
    del batches, loader
    clean_stale_shared_memory()
    started = time.perf_counter()
    resumed = _loader(arguments)
    resumed.load_state_dict(state)
    next(iter(resumed))
    return {"seconds": time.perf_counter() - started}


def _orders(num_utterances: int) -> dict[str, Any]:
    """Returns the positions of all utterances in two epochs, with the default algorithm and block size.

    The order of an epoch is computed anew for a resume; the time of the second one is returned.
    """
    num_shards = -(-num_utterances // SAMPLES_PER_SHARD)
    sizes = np.full(num_shards, SAMPLES_PER_SHARD)
    sizes[-1] = num_utterances - SAMPLES_PER_SHARD * (num_shards - 1)
    positions, seconds = [], 0.0
    for epoch in range(2):
        started = time.perf_counter()
        order = get_shuffle("py1e", sizes, 1, 9176, epoch, max(4_000_000, 1 << 18))
        seconds = time.perf_counter() - started
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        positions.append(inverse.tolist())
    return {"positions": positions, "resume_s": seconds}


if __name__ == "__main__":
    sys.exit(main())
