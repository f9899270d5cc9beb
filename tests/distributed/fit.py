"""Trains a tiny model on one rank or on several, which Lightning starts as copies of this command.

python -m tests.distributed.fit SPEECH NOISE WORLD_SIZE DIRECTORY
"""

import json
import sys
from pathlib import Path

import torch

from nestmodel import NestModel
from tests.conftest import MessyCorpora
from tests.training import FirstGradients, ProportionalSteps, Recorder, messy_data, tiny_config, trainer


def main(argv: list[str]) -> None:
    corpora = MessyCorpora(speech=Path(argv[0]), noise=Path(argv[1]), windows=Path(), banked=Path())
    world_size, directory = int(argv[2]), Path(argv[3])
    model, recorder, first = NestModel(tiny_config()), Recorder(), FirstGradients()
    runner = trainer(
        directory,
        [recorder, first, ProportionalSteps()],
        max_steps=5,
        devices=world_size,
        strategy="auto" if world_size == 1 else "ddp",
        limit_val_batches=1.0,
    )
    runner.fit(model, datamodule=messy_data(corpora, microbatches_per_step=4))
    seen = {"keys": recorder.keys, "losses": recorder.losses}
    (directory / f"rank-{runner.global_rank}.json").write_text(json.dumps(seen))
    if runner.is_global_zero:
        torch.save(first.grads, directory / "grads.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
