"""Compares optimizer steps of one length with steps whose microbatches come from different buckets.

    python -m benchmarks run lengths REAL_SPEECH OUTPUT [--seeds 3] [--steps 1200] [--model small] [--jobs 2]
        [--quick] [--results FILE.md]

REAL_SPEECH contains speech.json and noise.json (NeMo lines with `speaker` and `lang`). Both arms train on exactly the
same microbatches, with the same noise and masks. They differ only in which microbatches share an optimizer step: in the
arm "mixed", microbatch m of step s is microbatch m of step p_m(s) of the plan, with one permutation p_m of the steps of
an epoch for each m. Both arms have the same seed, weights and number of steps. Each run ends with the loss on held-out
speakers and a linear probe. Finished runs are skipped, and an interrupted run resumes, so the same command continues.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from pytorch_lightning.loggers import CSVLogger

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import own_command, run_peer
from benchmarks.harness.report import Report, machine, versions
from benchmarks.learning.parts.manifests import HELD_OUT, by_speaker, read_lines, write_lines
from nestdata import (
    AudioNoiseBatch,
    AudioNoiseDataset,
    BatchIndex,
    BatchPlan,
    Corpus,
    PlanConfig,
    PrepareConfig,
    derive_key,
    prepare_corpus,
)
from nestdata.stateless_rng import Permutation
from nestmodel import (
    Checkpoints,
    Curves,
    NestConfig,
    NestDataModule,
    NestModel,
    NestNetwork,
    iterate_features,
    loss_stats,
    newest_checkpoint,
)
from nestmodel.evaluate.probe.labels import fit_and_score
from nestmodel.training.callbacks.curves import read_metrics

QUICK = None
ARMS = ("one length", "mixed")
LABELS = ("speaker", "lang")
MICROBATCHES = 4
BATCH_SECONDS = 6.0
MAX_SECONDS = 6.0
VALIDATE_EVERY = 150  # steps
PROBE_SHARE = 30  # per cent of the labelled utterances


class MixedLengths(AudioNoiseDataset):
    """A data set in which the microbatches of a step come from different steps of the plan."""

    def __getitem__(self, index: BatchIndex | tuple[int, int] | SupportsIndex) -> AudioNoiseBatch:
        """Returns a microbatch of the plan; its key, and so its noise and masks, are those of the plan."""
        if isinstance(index, SupportsIndex):
            raise TypeError(f"{index!r}: give a step and a microbatch.")
        step, microbatch = index
        return super().__getitem__((mixed_step(self.plan, step, microbatch), microbatch))


def mixed_step(plan: BatchPlan, step: int, microbatch: int) -> int:
    """Returns the step of the plan whose microbatch is taken; every pair is taken once per epoch."""
    size, epoch = plan.steps_per_epoch, plan.epoch(step)
    order = Permutation(size, derive_key(plan.config.seed, "mixed lengths", epoch, microbatch))
    return epoch * size + order.at(step % size)


def main() -> int:
    """Runs what is not finished, and writes the report."""
    parser = benchmark_parser(__doc__, quick={"seeds": 1, "steps": 16})
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--model", choices=("small", "demo"), default="small")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, of one thread each")
    parser.add_argument("--run", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    if arguments.run:
        run(output, arguments.run[0], int(arguments.run[1]), arguments)
        return 0
    if not (output / "corpora.json").exists():
        prepare(arguments.real_speech.absolute(), output)
    runs = [(arm, seed) for seed, arm in product(range(arguments.seeds), ARMS)]
    unfinished = [one for one in runs if not result_file(output, *one, arguments.steps).exists()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda one: start(arguments, *one), unfinished))
    results = {one: json.loads(result_file(output, *one, arguments.steps).read_text()) for one in runs}
    report(output, results, arguments)
    return 0


def directory(output: Path, arm: str, seed: int) -> Path:
    """Returns the directory of a run."""
    return output / f"{arm.replace(' ', '-')}-{seed}"


def result_file(output: Path, arm: str, seed: int, steps: int) -> Path:
    """Returns the path of the result of a run after a number of steps; a longer run continues a shorter one."""
    return directory(output, arm, seed) / f"result-{steps}.json"


def start(arguments: argparse.Namespace, arm: str, seed: int) -> None:
    """Trains in a process of one thread."""
    command = own_command(__file__, arguments.real_speech, arguments.output, "--steps", arguments.steps)
    command += ["--model", arguments.model, "--run", arm, str(seed)]
    print(f"{arm}, seed {seed}", file=sys.stderr, flush=True)
    run_peer(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def prepare(real: Path, output: Path) -> None:
    """Prepares the corpora: training and held-out speakers, noise, and the labelled utterances of the probe."""
    output.mkdir(parents=True, exist_ok=True)
    probed = [
        {**line, "audio_filepath": str(real / line["audio_filepath"])}
        for line in read_lines(real / "speech.json")
        if digest(line["audio_filepath"]) % 100 < PROBE_SHARE
    ]
    sides = {**by_speaker(real), "probe": probed}
    for name, rows in sides.items():
        manifest = output / f"{name}.json"
        write_lines(manifest, rows)
        limits = PrepareConfig(pcm=True, max_seconds=None if name == "noise" else MAX_SECONDS)
        prepare_corpus([manifest], output / f"{name}.corpus", limits, overwrite=True)
    sizes = {name: Corpus.open(output / f"{name}.corpus") for name in sides}
    (output / "corpora.json").write_text(json.dumps({name: (len(c), c.hours) for name, c in sizes.items()}))


def digest(text: str) -> int:
    """Returns a hash that is equal on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def config_of(seed: int, model: str) -> NestConfig:
    """Returns the demo preset, or a smaller model that learns faster: fewer classes, short masks and no dropout."""
    config = replace(NestConfig.preset("demo"), seed=seed)
    if model == "demo":
        return replace(config, optimizer=replace(config.optimizer, lr=0.3, warmup_steps=200))
    sizes: dict[str, Any] = {"d_model": 96, "num_layers": 2, "subsampling_channels": 32}
    return replace(
        config,
        encoder=replace(config.encoder, **sizes, dropout=0.0, dropout_pre_encoder=0.0, dropout_att=0.0),
        quantizer=replace(config.quantizer, num_classes=64),
        masking=replace(config.masking, block_size=12, prob=0.05),
        optimizer=replace(config.optimizer, lr=0.3, warmup_steps=100),
    )


def data_of(output: Path, arm: str, seed: int) -> NestDataModule:
    """Returns the batches of an arm. Validation is the same in both arms."""
    plan = PlanConfig(max_batch_seconds=BATCH_SECONDS, microbatches_per_step=MICROBATCHES, seed=seed)
    paths = {name: output / f"{name}.corpus" for name in ("train", "noise", "held_out")}
    data = NestDataModule(paths["train"], paths["noise"], paths["held_out"], plan=plan, num_workers=0)
    if arm == "mixed":
        train = data.train_dataset
        data.train_dataset = MixedLengths(train.corpus, train.plan, train.noise, train.mixer)
    return data


def run(output: Path, arm: str, seed: int, arguments: argparse.Namespace) -> None:
    """Trains one run from its last checkpoint on, then writes its result."""
    torch.set_num_threads(1)
    root = directory(output, arm, seed)
    every = min(VALIDATE_EVERY, arguments.steps // 2)
    model, data = NestModel(config_of(seed, arguments.model)), data_of(output, arm, seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=arguments.steps,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=min(20, every),
        default_root_dir=root,
        logger=CSVLogger(root, name=""),
        callbacks=[Checkpoints(every_n_steps=min(50, every)), Curves()],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    newest = newest_checkpoint(root)
    trainer.fit(model, data, ckpt_path=None if newest is None else str(newest))
    assert trainer.loggers[0].log_dir is not None
    series = read_metrics(Path(trainer.loggers[0].log_dir))
    curve = [series[name] for name in ("val_loss", "val_token_entropy", "val_accuracy")]
    result = {
        "steps": [step + 1 for step in curve[0][0]],
        "val_loss": curve[0][1],
        "entropy": curve[1][1],
        "accuracy": curve[2][1],
        "train_loss": series["train_loss"][1],
        "probe": probe(model, output),
        # Both arms start with the same weights.
        "untrained": probe(NestNetwork(config_of(seed, arguments.model)), output) if arm == ARMS[0] else None,
    }
    result_file(output, arm, seed, arguments.steps).write_text(json.dumps(result))


def probe(network: NestNetwork, output: Path) -> dict[str, float]:
    """Returns the accuracy of a linear probe on all layers together by label; half of the utterances are held out."""
    corpus = Corpus.open(output / "probe.corpus")
    lines, pooled = [], []
    for utterance in iterate_features(network, corpus, "all", 60.0, "cpu", on_reject=lambda _: None):
        values = utterance.values
        pooled.append(np.concatenate([values.mean(axis=1), values.std(axis=1)], axis=-1).flatten())
        lines.append(utterance.line)
    return {label: probe_label(np.stack(pooled), lines, label) for label in LABELS}


def probe_label(features: NDArray[np.float32], lines: list[dict[str, Any]], label: str) -> float:
    """Returns the accuracy for one label, over the classes with at least 10 utterances on each side."""
    names = np.array([label_of(line, label) for line in lines])
    held_out = np.array([digest(line["id"]) % 2 == 0 for line in lines])
    sides = [dict(zip(*np.unique(names[side], return_counts=True), strict=True)) for side in (held_out, ~held_out)]
    classes = [name for name in sides[0] if name and min(side.get(name, 0) for side in sides) >= 10]
    is_used = np.isin(names, classes)
    numbers = np.searchsorted(classes, names[is_used])
    return fit_and_score(features[is_used], numbers, held_out[is_used], 0).accuracy


def label_of(line: dict[str, Any], label: str) -> str:
    """Returns a label of a cut, or an empty string."""
    (supervision,) = line.get("supervisions") or [{}]
    found = {**supervision, **(supervision.get("custom") or {})}
    return str(found.get("language" if label == "lang" else label) or "")


def imbalance(output: Path, model_name: str, rounds: int) -> dict[str, Any]:
    """Measures microbatches of all buckets, and computes how much longer the slowest rank of a mixed step takes.

    Returns:
        Fastest and slowest shape over the mean, and by number of ranks the time of the slowest rank over the mean rank.
        A rank takes one microbatch per step with 4 ranks, and two with 2 ranks.
    """
    torch.set_num_threads(1)
    data, model = data_of(output, "one length", 0), NestModel(config_of(0, model_name)).train()
    plan = data.train_dataset.plan
    steps = {plan.bucket(step).first_group: step for step in range(plan.steps_per_epoch)}
    batches = {group: data.train_dataset[step, 0] for group, step in steps.items()}
    times: dict[int, list[float]] = {group: [] for group in steps}
    for _ in range(rounds + 1):
        for group, batch in batches.items():
            started = time.process_time()  # on one thread, and not affected by other processes as much as wall clock
            loss_stats(model(batch)).loss.backward()
            times[group].append(time.process_time() - started)
    seconds = {group: statistics.median(found[1:]) for group, found in times.items()}  # the first round is warm-up
    table = np.array([seconds[plan.bucket(step).first_group] for step in range(plan.steps_per_epoch)])
    mixed = np.array(
        [[table[mixed_step(plan, s, m)] for m in range(MICROBATCHES)] for s in range(plan.steps_per_epoch)]
    )
    by_ranks = {}
    for ranks in (2, 4):
        of_rank = mixed.reshape(len(mixed), ranks, -1).sum(axis=2)
        by_ranks[ranks] = float(of_rank.max(axis=1).sum() / of_rank.mean(axis=1).sum())
    return {"fastest": table.min() / table.mean(), "slowest": table.max() / table.mean(), "ranks": by_ranks}


def report(output: Path, results: dict[tuple[str, int], dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints the result."""
    seeds = range(arguments.seeds)
    page = Report(
        "Lengths in an optimizer step",
        __file__,
        f"{arguments.seeds} seeds, {machine()}, {versions('torch', 'pytorch-lightning', 'scikit-learn')}. Held-out "
        f"speakers: {', '.join(HELD_OUT)}. Speech above {MAX_SECONDS:g} s is excluded.",
        measured=["nestmodel/nn"],
        results=arguments.results,
    )
    corpora = json.loads((output / "corpora.json").read_text())
    page.table(["corpus", "cuts", "hours"], ([name, size, f"{hours:.2f}"] for name, (size, hours) in corpora.items()))
    page.text(f"""The model is "{arguments.model}" of the script: {MICROBATCHES} microbatches of {BATCH_SECONDS:g} s per
        step, {arguments.steps} steps. Both arms train on the same microbatches, with the same noise and masks, and
        differ only in which microbatches share a step. "One length" is the plan; "mixed" permutes its steps for each
        microbatch.""")
    metrics: dict[str, Callable[[dict[str, Any]], float]] = {
        "validation loss, nats": lambda r: r["val_loss"][-1],
        "the same, mean of the last 3 validations": lambda r: statistics.mean(r["val_loss"][-3:]),
        "below the entropy by, nats": lambda r: r["entropy"][-1] - r["val_loss"][-1],
        "masked accuracy, %": lambda r: 100 * r["accuracy"][-1],
        **{f"probe, {label}, %": partial(_probe_percent, label) for label in LABELS},
    }
    rows = []
    for name, metric in metrics.items():
        found = {arm: [metric(results[arm, seed]) for seed in seeds] for arm in ARMS}
        differences = [b - a for a, b in zip(found[ARMS[0]], found[ARMS[1]], strict=True)]
        rows.append([name, *map(spread, (found[ARMS[0]], found[ARMS[1]], differences))])
    page.table(["", *ARMS, "mixed - one length, same seed"], rows)
    untrained = ", ".join(
        f"{label} {100 * statistics.mean(results[ARMS[0], seed]['untrained'][label] for seed in seeds):.1f} %"
        for label in LABELS
    )
    page.text(f"""Mean and standard deviation over the seeds, and in brackets the values. The probe of an untrained
        encoder: {untrained}.""")
    curves = [
        [step, *(spread([results[arm, seed]["val_loss"][i] for seed in seeds]) for arm in ARMS)]
        for i, step in enumerate(results[ARMS[0], 0]["steps"])
    ]
    page.table(["step", *(f"validation loss, {arm}" for arm in ARMS)], curves)
    cost = imbalance(output, arguments.model, 1 if arguments.quick else 5)
    by_ranks = ", ".join(f"{ratio:.3f} with {ranks} ranks" for ranks, ratio in cost["ranks"].items())
    page.section("Balance")
    page.text(f"""With one length, all microbatches of a step have the same shape. A measured forward and backward pass
        of the shapes takes between {cost["fastest"]:.2f} and {cost["slowest"]:.2f} of their mean. In mixed steps, the
        slowest rank takes {by_ranks}, relative to the mean rank.""")


def _probe_percent(label: str, result: dict[str, Any]) -> float:
    return 100 * float(result["probe"][label])


def spread(values: Sequence[float]) -> str:
    """Returns mean, standard deviation and values."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    listed = ", ".join(f"{value:.3f}" for value in values)
    return f"{statistics.mean(values):.3f} ± {deviation:.3f} ({listed})"


if __name__ == "__main__":
    sys.exit(main())
