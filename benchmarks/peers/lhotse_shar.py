"""Lhotse Shar on the speech of the benchmark `remote`, which runs it: writing, speed and resume.

Runs in this project's environment, which has Lhotse. Prints utterances per second, or seconds.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import soundfile
import torch
from lhotse import CutSet, MonoCut, Recording
from lhotse.audio.source import AudioSource
from lhotse.dataset import DynamicBucketingSampler
from lhotse.dataset.collation import collate_audio
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from steady import utterances_per_s
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
SHARD = 335
"""Utterances of a shard, as in the shards of MosaicML Streaming."""

BATCH_SECONDS = 160.0


class Speech(torch.utils.data.Dataset[Any]):
    """Decodes and pads a batch of cuts."""

    def __getitem__(self, cuts: CutSet) -> tuple[list[str], torch.Tensor]:
        """Returns ids and padded samples."""
        audio, _ = collate_audio(cuts)
        return [cut.id for cut in cuts], audio


def main() -> int:
    """Runs the given task and prints its measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "speed", "resume"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--min-batches", type=int, default=160)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "write":
        write(arguments.manifest, arguments.directory)
    else:
        print(speed(arguments) if arguments.what == "speed" else resume(arguments.directory))
    return 0


def write(manifest: Path, directory: Path) -> None:
    """Writes the files of a manifest as Lhotse Shar."""
    directory.mkdir()
    cuts = []
    for row in map(json.loads, manifest.open()):
        path = Path(manifest.parent, row["audio_filepath"])
        info = soundfile.info(path)
        source = AudioSource("file", [0], str(path))
        recording = Recording(path.stem, [source], info.samplerate, info.frames, info.frames / info.samplerate)
        cuts.append(MonoCut(path.stem, 0, recording.duration, 0, recording=recording))
    CutSet.from_cuts(cuts).to_shar(directory, fields={"recording": "flac"}, shard_size=SHARD)


def sampler_of(directory: Path, *, is_endless: bool = False) -> DynamicBucketingSampler:
    """Returns a sampler from the start of an epoch."""
    cuts = CutSet.from_shar(in_dir=directory, shuffle_shards=True, seed=0, stateful_shuffle=True)
    if is_endless:
        cuts = cuts.repeat(preserve_id=True)
    return DynamicBucketingSampler(
        cuts, max_duration=BATCH_SECONDS, num_buckets=10, shuffle=True, seed=0, world_size=1, rank=0
    )


def speed(arguments: argparse.Namespace) -> float:
    """Reads at least two epochs, which follow on each other without a pause, as ours do."""
    num_batches = max(arguments.min_batches, 2 * sum(1 for _ in sampler_of(arguments.directory)))
    dataset = IterableDatasetWrapper(Speech(), sampler_of(arguments.directory, is_endless=True))
    loader = DataLoader(dataset, batch_size=None, num_workers=arguments.workers)
    found: float = utterances_per_s((len(ids) for ids, _ in loader), num_batches)
    return found


def resume(directory: Path) -> float:
    """Stops in the middle of an epoch, and measures the time to the next batch of a restored sampler."""
    num_batches = sum(1 for _ in sampler_of(directory))
    stopped = sampler_of(directory)
    batches = iter(stopped)
    for _ in range(num_batches // 2):
        next(batches)
    Speech()[next(iter(sampler_of(directory)))]
    state = stopped.state_dict()
    started = time.perf_counter()
    resumed = sampler_of(directory)
    resumed.load_state_dict(state)
    Speech()[next(iter(resumed))]
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
