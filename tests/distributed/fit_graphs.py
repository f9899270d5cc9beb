"""Trains a tiny model on two ranks by the code for GPUs, with microbatches as graphs or without.

python -m tests.distributed.fit_graphs SPEECH NOISE DIRECTORY FORM

FORM is `replayed`, `run` (the same work without a capture), `summed once` (without graphs, but one all-reduce of all
gradients, as with graphs), `plain`, or `given up` (a compiled form, which fails on the second rank).
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from nestdata import MixConfig, PlanConfig
from nestmodel import DataConfig, NestDataModule, NestModel
from nestmodel.nn import features
from nestmodel.nn.gpu import block, devices
from nestmodel.nn.gpu.forms import Forms
from nestmodel.nn.gpu.step_graph import StepGraphs
from nestmodel.training.starting import run_form
from tests.tape import TapeCapture
from tests.training import ProportionalSteps, Recorder, tiny_config, trainer


def plant_compiled_form(*, fails: bool) -> None:
    """Makes `auto` a compiled form, for which torch's compiler returns what it is given, or a function that fails."""

    def compile_block(function: Callable[..., Tensor], _dynamic: object) -> Callable[..., Tensor]:
        def fail(*_: object) -> Tensor:
            raise RuntimeError("planted")

        return fail if fails else function

    compiled = Forms(subsampling_kernel=False, compiled=True)
    features._compiled = lambda function, _: function  # type: ignore[assignment]
    block._compile = compile_block  # type: ignore[assignment]
    run_form.default_forms = lambda *_: compiled  # type: ignore[assignment]


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
    runner = trainer(directory, [recorder, ProportionalSteps()], max_steps=4, devices=2, strategy="ddp")
    if form == "given up":
        plant_compiled_form(fails=runner.global_rank == 1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        runner.fit(model, datamodule=data)
    seen = {
        "losses": recorder.losses,
        "replays": capture.num_replays,
        "captures": capture.num_captures,
        "form": str(model.forms),
        "warnings": sum("plain form" in str(each.message) for each in caught),
    }
    (directory / f"rank-{runner.global_rank}.json").write_text(json.dumps(seen))
    torch.save(model.state_dict(), directory / f"weights-{runner.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
