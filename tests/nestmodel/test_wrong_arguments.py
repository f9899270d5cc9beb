"""Objects, classes and mappings in the wrong place, in a process without the type checker of the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import MessyCorpora

PROGRAM = """
import json, sys
from dataclasses import replace
import nestmodel, pytorch_lightning as pl
from nestdata import *
from nestmodel import *

class Mine(pl.Callback):
    pass

corpus, mistakes, told = Corpus.open(sys.argv[1]), json.loads(sys.argv[2]), []
plan, run = BatchPlan.of(corpus), RunConfig.read(["demo"])
for mistake in mistakes:
    try:
        eval(mistake)
    except NestError as error:
        told.append(str(error))
print(json.dumps(told))
"""
MISTAKES = {
    "nestmodel.fit({'data': {}})": "config is {'data': {}}: expected an object of RunConfig.",
    "nestmodel.fit(RunConfig)": "config is <class 'nestmodel.run_config.RunConfig'>: expected an object of RunConfig.",
    "nestmodel.validate({})": "config is {}: expected an object of RunConfig.",
    "nestmodel.fit(run, callbacks=Mine)": "callbacks is <class '__main__.Mine'>: expected a list of objects.",
    "nestmodel.fit(run, callbacks=[Mine])": "callbacks[0] is <class '__main__.Mine'>: expected an object of Callback.",
    "TrainerConfig(callbacks=[Mine])": "trainer.callbacks is [<class '__main__.Mine'>]: expected ClassConfigs; "
    "fit(config, callbacks=[...]) takes objects.",
    "DataConfig(plan={'seed': 1})": "data.plan is {'seed': 1}: expected an object of PlanConfig.",
    "DataConfig(mix=MixConfig)": "data.mix is <class 'nestdata.batch.mix.MixConfig'>: expected an object of MixConfig.",
    "replace(run, model=replace(run.model, config={}))": "model.config is {}: expected an object of NestConfig.",
    "replace(run, guard=GuardConfig(limits={}))": "guard.limits is {}: expected an object of StallLimits.",
    "BatchPlan.of(corpus, {'seed': 1})": "config is {'seed': 1}: expected an object of PlanConfig.",
    "AudioNoiseDataset(corpus, plan={})": "plan is {}: expected a BatchPlan, such as BatchPlan.of(corpus, "
    "PlanConfig(...)).",
    "AudioNoiseDataset(corpus, plan, mixer={})": "mixer is {}: expected an object of SpeakerNoiseMixer.",
    "AudioNoiseDataset(corpus, plan, augment={})": "augment is {}: expected an object of AugmentConfig.",
    "AudioNoiseDataset(corpus, plan, augment=AugmentConfig(noise='Gain'))": "augment.noise is 'Gain': expected a "
    "list of transforms.",
}


def test_what_is_in_the_wrong_place_is_named_in_one_line(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(messy_corpora.speech), json.dumps(list(MISTAKES))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert dict(zip(MISTAKES, json.loads(run.stdout), strict=True)) == MISTAKES
    assert list(tmp_path.iterdir()) == []
