"""Lhotse Shar on the speech of the benchmark `remote`, which runs it: writing, speed, resume and order.

Runs in this project's environment, which has Lhotse. Prints JSON.
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
    """Does one thing and prints what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "speed", "resume", "order"])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-batches", type=int, default=160)
    parser.add_argument("--utterances", type=int, default=200_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "write":
        _write(arguments.manifest, arguments.directory)
    elif arguments.what == "order":
        print(json.dumps(_orders(arguments.directory, arguments.utterances)))
    else:
        print(json.dumps((_speed if arguments.what == "speed" else _resume)(arguments)))
    return 0


def _write(manifest: Path, directory: Path) -> None:
    rows = [json.loads(line) for line in manifest.open()]
    directory.mkdir()
    cuts = []
    for row in rows:
        path = Path(manifest.parent, row["audio_filepath"])
        info = soundfile.info(path)
        source = AudioSource("file", [0], str(path))
        recording = Recording(path.stem, [source], info.samplerate, info.frames, info.frames / info.samplerate)
        cuts.append(MonoCut(path.stem, 0, recording.duration, 0, recording=recording))
    CutSet.from_cuts(cuts).to_shar(directory, fields={"recording": "flac"}, shard_size=SHARD)


def _sampler(directory: Path, *, is_endless: bool = False) -> DynamicBucketingSampler:
    cuts = CutSet.from_shar(in_dir=directory, shuffle_shards=True, seed=0, stateful_shuffle=True)
    if is_endless:
        cuts = cuts.repeat(preserve_id=True)
    return DynamicBucketingSampler(
        cuts, max_duration=BATCH_SECONDS, num_buckets=10, shuffle=True, seed=0, world_size=1, rank=0
    )


def _loader(arguments: argparse.Namespace, sampler: DynamicBucketingSampler) -> DataLoader[Any]:
    return DataLoader(IterableDatasetWrapper(Speech(), sampler), batch_size=None, num_workers=arguments.workers)


def _speed(arguments: argparse.Namespace) -> dict[str, float]:
    """Reads at least two epochs, which follow on each other without a pause, as ours do."""
    num_batches = max(arguments.min_batches, 2 * sum(1 for _ in _sampler(arguments.directory)))
    loader = _loader(arguments, _sampler(arguments.directory, is_endless=True))
    return {"utterances_per_s": utterances_per_s((len(ids) for ids, _ in loader), num_batches)}


def _resume(arguments: argparse.Namespace) -> dict[str, float]:
    """Stops in the middle of an epoch, and measures the time to the next batch of a restored sampler."""
    sampler, num_batches = _sampler_in_middle(arguments.directory)
    Speech()[next(iter(_sampler(arguments.directory)))]
    state = sampler.state_dict()
    started = time.perf_counter()
    resumed = _sampler(arguments.directory)
    resumed.load_state_dict(state)
    Speech()[next(iter(resumed))]
    return {"seconds": time.perf_counter() - started, "batches": num_batches}


def _sampler_in_middle(directory: Path) -> tuple[DynamicBucketingSampler, int]:
    """Returns a sampler that has yielded half of an epoch, and the number of batches of the epoch."""
    num_batches = sum(1 for _ in _sampler(directory))
    sampler = _sampler(directory)
    batches = iter(sampler)
    for _ in range(num_batches // 2):
        next(batches)
    return sampler, num_batches


def _orders(directory: Path, num_utterances: int) -> dict[str, Any]:
    """Returns the positions of all utterances in two epochs of a set of cuts without audio, and the time to resume."""
    directory.mkdir()
    CutSet.from_cuts(map(_cut, range(num_utterances))).to_shar(directory, fields={}, shard_size=SHARD)
    sampler = _sampler(directory)
    positions = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ids = [int(cut.id) for cuts in sampler for cut in cuts]
        inverse = [0] * num_utterances
        for position, number in enumerate(ids):
            inverse[number] = position
        positions.append(inverse)
    state = _sampler_in_middle(directory)[0].state_dict()
    started = time.perf_counter()
    resumed = _sampler(directory)
    resumed.load_state_dict(state)
    next(iter(resumed))
    return {"positions": positions, "resume_s": time.perf_counter() - started}


def _cut(number: int) -> MonoCut:
    """Returns a cut of 8 to 12 s; its length says nothing about its number."""
    duration = 8 + 4 * (number * 0.618034 % 1)
    return MonoCut(str(number), 0, round(duration, 2), 0)


if __name__ == "__main__":
    sys.exit(main())
