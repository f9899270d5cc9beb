"""Trains a tiny model on two ranks whose races would end differently, and writes the choice of each rank.

python -m tests.distributed.raced_run SPEECH NOISE DIRECTORY
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from nestmodel import NestModel
from tests.conftest import MessyCorpora
from tests.planted_forms import Planted, plant_forms
from tests.training import messy_data, tiny_config, trainer


def main(argv: list[str]) -> None:
    corpora = MessyCorpora(speech=Path(argv[0]), noise=Path(argv[1]), windows=Path(), banked=Path())
    directory = Path(argv[2])
    model = NestModel(tiny_config())
    runner = trainer(directory, max_steps=1, devices=2, strategy="ddp")
    races = plant_forms(setattr, Planted(1.0), Planted(0.5 if runner.global_rank == 0 else 2.0))
    runner.fit(model, datamodule=messy_data(corpora))
    choice = model._chosen
    assert choice is not None
    result = {
        "races": len(races),
        "kernels": asdict(choice.kernels),
        "uses": model.encoder.pre_encode.has_joined_stages,
    }
    (directory / f"rank-{runner.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
