"""Loads the batches of one rank and writes their digests.

python -m tests.distributed.rank KIND SPEECH WINDOWS NOISE RANK WORLD_SIZE NUM_WORKERS NUM_THREADS NUM_STEPS OUTPUT
"""

import json
import sys
from pathlib import Path

import torch

from nestdata import microbatches
from tests.batches import digest, full_dataset, messy_dataset


def main(argv: list[str]) -> None:
    speech, windows, noise, output = Path(argv[1]), Path(argv[2]), Path(argv[3]), Path(argv[9])
    rank, world_size, num_workers, num_threads, num_steps = map(int, argv[4:9])
    torch.set_num_threads(num_threads)
    dataset = full_dataset(speech, windows, noise) if argv[0] == "full" else messy_dataset(speech, noise)
    indices = microbatches(dataset.plan, rank=rank, world_size=world_size, num_steps=num_steps)
    loader = dataset.loader(indices, num_workers=num_workers)
    seen = [{"step": batch.key.step, "microbatch": batch.key.microbatch, **digest(batch)} for batch in loader]
    output.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1:])
