"""Trains a tiny model on two ranks by the code for GPUs, with microbatches as graphs or without.

python -m tests.distributed.fit_graphs SPEECH NOISE DIRECTORY FORM

FORM is `replayed`, `run` (the same work without a capture), `summed once` (without graphs, but one all-reduce of all
gradients, as with graphs), or `plain`.
"""

import json
import sys
from pathlib import Path

import torch

from nestdata import MixConfig, PlanConfig
from nestmodel import DataConfig, NestDataModule, NestModel
from nestmodel.nn.gpu import devices
from nestmodel.nn.gpu.step_graph import StepGraphs
from tests.tape import TapeCapture
from tests.training import ProportionalSteps, Recorder, tiny_config, trainer


def main(argv: list[str]) -> None:
    speech, noise, directory, form = Path(argv[0]), Path(argv[1]), Path(argv[2]), argv[3]
    devices.is_on_gpu = lambda _: True  # type: ignore[assignment]
    model, recorder, capture = NestModel(tiny_config()), Recorder(), TapeCapture()
    if form in ("replayed", "run", "summed once"):
        model.use_graphs(2, capture if form == "replayed" else lambda work: work)
    if form == "summed once":
        StepGraphs.pad = lambda _, masks: masks  # type: ignore[method-assign]
        StepGraphs.forward = lambda *_: None  # type: ignore[method-assign]
    plan = PlanConfig(max_batch_seconds=10.0, microbatches_per_step=6, num_shapes=2)
    data = NestDataModule(DataConfig(speech, noise, speech, plan, MixConfig(prob=0.8), num_workers=0))
    settings = {"max_steps": 4, "devices": 2, "strategy": "ddp", "gradient_clip_val": 0.5}
    runner = trainer(directory, [recorder, ProportionalSteps()], **settings)
    runner.fit(model, datamodule=data)
    seen = {
        "losses": recorder.losses,
        "replays": capture.num_replays,
        "captures": capture.num_captures,
    }
    (directory / f"rank-{runner.global_rank}.json").write_text(json.dumps(seen))
    torch.save(model.state_dict(), directory / f"weights-{runner.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
