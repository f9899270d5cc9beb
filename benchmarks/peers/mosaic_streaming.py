"""MosaicML Streaming on the speech of the benchmark `remote`, which runs it: writing, speed and resume.

Runs in an environment with `mosaicml-streaming`, `soundfile` and torch. Prints utterances per second, or seconds.
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
from streaming.base.util import clean_stale_shared_memory

warnings.filterwarnings("ignore")
BATCH = 16


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
    """Runs the given task and prints its measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "speed", "resume"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--remote", help="URL of the data; the directory is then emptied and used as the cache")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--min-batches", type=int, default=160)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "write":
        write(arguments.manifest, arguments.directory)
        return 0
    clean_stale_shared_memory()
    print(speed(arguments) if arguments.what == "speed" else resume(arguments.directory))
    return 0


def write(manifest: Path, directory: Path) -> None:
    """Writes the files of a manifest as shards of the default size."""
    with MDSWriter(out=str(directory), columns={"id": "str", "flac": "bytes"}) as writer:
        for row in map(json.loads, manifest.open()):
            path = Path(manifest.parent, row["audio_filepath"])
            writer.write({"id": path.stem, "flac": path.read_bytes()})


def loader_of(
    directory: Path, workers: int, remote: str | None = None, epoch_size: int | None = None, *, decode: bool = True
) -> StreamingDataLoader:
    """Returns a loader from the start of an epoch."""
    if remote:
        shutil.rmtree(directory, ignore_errors=True)
    dataset = Speech(local=str(directory), remote=remote, shuffle=True, batch_size=BATCH, epoch_size=epoch_size)
    dataset.decode = decode
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=collate)


def speed(arguments: argparse.Namespace) -> float:
    """Reads the utterances at least twice without a pause, as ours are read; once if the cache is empty at first."""
    epoch_size = None
    if not arguments.remote:
        index = json.loads((arguments.directory / "index.json").read_text())
        epoch_size = max(arguments.min_batches * BATCH, 2 * sum(shard["samples"] for shard in index["shards"]))
    loader = loader_of(arguments.directory, arguments.workers, arguments.remote, epoch_size)
    found: float = utterances_per_s((len(names) for names, _ in loader), len(loader))
    return found


def resume(directory: Path) -> float:
    """Stops in the middle of an epoch, and measures the time to the next batch of a new loader without workers."""
    loader = loader_of(directory, 0, decode=False)
    batches = iter(loader)
    for _ in range(len(loader) // 2):
        next(batches)
    state = loader.state_dict()
    del batches, loader
    clean_stale_shared_memory()
    started = time.perf_counter()
    resumed = loader_of(directory, 0)
    resumed.load_state_dict(state)
    next(iter(resumed))
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
