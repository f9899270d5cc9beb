"""What `fit` prints before and after training: data, model, steps, ranks; results, output, and what may come next."""

import math
import shlex
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping

from nestdata import Corpus, redacted, summarise_plan
from nestdata.plan.summary import PlanSummary, few_steps_text, left_out_text, padding_text
from nestmodel.class_config import ClassConfig
from nestmodel.config import EncoderConfig
from nestmodel.nn.backend import choose_backend
from nestmodel.run_config import RunConfig
from nestmodel.training.data import NestDataModule
from nestmodel.training.launcher import determinism
from nestmodel.training.module import NestModel
from nestmodel.training.run_state import format_duration
from nestmodel.training.saving.run_folders import unfinished_run
from nestmodel.training.step_limits import num_steps_of_run
from nestmodel.training.step_stats import StopRequests
from nestmodel.training.trackers import tracker_names

_NAME_WIDTH = 12
_MIN_WIDTH = 40

_SMALL_FOR_A_CPU = 5e6
"""Parameters of a model that learns on a CPU within minutes."""

_OUTPUTS = {"metrics": "metrics.csv", "curves": "curves.png", "checkpoints": "checkpoints"}

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Run:
    """A run that is built and checked, and has not started."""

    config: RunConfig
    model: NestModel
    data: NestDataModule
    trainer: pl.Trainer

    ckpt_path: Path | None
    """The checkpoint that the run resumes from."""

    first_step: int
    """Optimizer steps that it has made."""


def print_summary(run: Run) -> None:
    """Prints the summary of a run to stderr, on rank 0, for the width of the terminal."""
    if not run.trainer.is_global_zero:
        return
    number = sum(parameter.numel() for parameter in run.model.parameters())
    if run.trainer.strategy.root_device.type == "cpu" and number > _SMALL_FOR_A_CPU:
        print(
            f"there is no GPU: steps of a model of {number / 1e6:.0f} M parameters take minutes on a CPU. For a model "
            "that learns on one, take --config demo.",
            file=sys.stderr,
        )
    print(format_summary(summarise_run(run), shutil.get_terminal_size().columns), file=sys.stderr, flush=True)


def print_rows(run: Run, rows: Rows) -> None:
    """Prints rows of a summary to stderr, on rank 0."""
    if run.trainer.is_global_zero:
        for name, text in rows:
            print(f"{name}: {text}", file=sys.stderr)


def print_nothing_to_train(run: Run) -> None:
    """Prints that a checkpoint has made all steps of its run, and what to do."""
    optimizer = run.model.config.optimizer
    remedy = (
        f"The schedule {optimizer.schedule} ended there: start a new run from the weights, by --init-from."
        if optimizer.ends_with_run
        else "Raise it to train longer."
    )
    print(
        f"nothing to train: {run.ckpt_path} has made {run.first_step:,} steps, and trainer.max_steps is "
        f"{run.config.trainer.max_steps:,}. {remedy}"
    )


def summarise_run(run: Run) -> Rows:
    """Returns the summary of a run before `fit` as (name, text); URLs in it are without their secrets."""
    trainer, model, data, config = run.trainer, run.model, run.data, run.config
    encoder = model.config.encoder
    is_limited = isinstance(encoder, EncoderConfig) and encoder.is_limited
    noise = data.noise.corpus
    epoch = summarise_plan(data.plan, data.train_dataset.corpus.num_samples)
    rows = [
        ("corpus", ", ".join(_corpus_text(corpus) for corpus in data.train_dataset.corpus.corpora)),
        ("noise", "other speech only" if noise is None else f"{_corpus_text(noise)}, and other speech"),
        ("validation", _validation_text(run)),
        ("model", _model_text(model)),
        *([("look-ahead", model.config.describe_contexts())] if is_limited else []),
        ("steps", _steps_text(trainer, data, config.trainer.max_time)),
        ("batches", _batches_text(data, epoch)),
        *few_steps_rows(data, epoch),
        ("padding", padding_text(epoch, lambda index: str(data.train_dataset.corpus.line(index)["id"]))),
        *left_out_rows(data),
        ("ranks", _ranks_text(trainer)),
        *_backend_rows(trainer, model, data),
        ("numbers", f"precision {trainer.precision}, seed {config.seed}{', deterministic' if determinism() else ''}"),
        ("start", _start_text(run)),
        ("saved", f"a checkpoint every {config.checkpoints.every_n_steps:,} steps"),
        *([] if config.guard.enabled else [("stall guard", "off")]),
        ("log", ", ".join(["csv", *tracker_names(config.log)])),
        ("output", str(trainer.log_dir or config.output)),
    ]
    return [(name, redacted(text)) for name, text in rows]


def _validation_text(run: Run) -> str:
    val, interval = run.data.val_dataset, run.config.trainer.val_check_interval
    if val is None:
        return "none"
    corpora = ", ".join(_corpus_text(corpus) for corpus in val.corpus.corpora)
    if not isinstance(interval, int):
        return corpora
    num_steps = num_steps_of_run(run.trainer, run.data.plan.steps_per_epoch)
    never = ", so none in this run" if num_steps is not None and interval > num_steps else ""
    return f"{corpora}, every {interval:,} steps{never}"


def _corpus_text(corpus: Corpus) -> str:
    return f"{corpus.path} ({_hours(corpus.hours)})"


def _hours(hours: float) -> str:
    if hours < 0.1:
        return f"{3600 * hours:.0f} s"
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.2f} h"


def _model_text(model: NestModel) -> str:
    encoder, config = model.encoder, model.config.encoder
    size = f"{encoder.dim} x {encoder.num_layers} layers"
    if isinstance(config, ClassConfig):
        size = f"{config.class_path}, dim {encoder.dim}"
    number = sum(parameter.numel() for parameter in model.parameters())
    parameters = f"{number / 1e6:.3g} M" if number >= 1e5 else f"{number:,}"
    return f"{size}, {parameters} parameters, frames of {1000 * model.frame_s:g} ms"


def _steps_text(trainer: pl.Trainer, data: NestDataModule, max_time: str | None) -> str:
    per_epoch = data.plan.steps_per_epoch
    num_steps = num_steps_of_run(trainer, per_epoch)
    parts = ["no limit" if num_steps is None else f"{num_steps:,}"]
    if num_steps is not None and per_epoch:
        epochs = num_steps / per_epoch
        number = f"{epochs:,.0f}" if epochs >= 100 or epochs.is_integer() else f"{epochs:.3g}"
        parts.append(f"{number} {'epoch' if number == '1' else 'epochs'} of {per_epoch:,}")
    return ", ".join([*parts, *([f"at most {max_time}"] if max_time else [])])


def _batches_text(data: NestDataModule, epoch: PlanSummary) -> str:
    plan, augment = data.plan.config, data.train_dataset.augment
    augmented = ", augmented" if augment.speech or augment.noise or augment.mixture else ""
    return (
        f"{plan.microbatches_per_step} x {plan.max_batch_seconds:g} s, so up to {epoch.seconds_asked:,g} s of audio "
        f"per step, {epoch.seconds_per_step:,.0f} s on average{augmented}; loader workers per rank: {data.num_workers}"
    )


def few_steps_rows(data: NestDataModule, epoch: PlanSummary | None = None) -> Rows:
    """Returns a row of the summary that says that the corpus holds less than two steps; empty if it holds more.

    Args:
        data: The data of the run.
        epoch: Summary of the plan of training, if it is known.
    """
    plan = data.plan
    text = few_steps_text(plan, epoch or summarise_plan(plan, data.train_dataset.corpus.num_samples))
    return [] if text is None else [("few steps", text)]


def left_out_rows(data: NestDataModule) -> Rows:
    """Returns the cuts that are too long or too short for the plan, for a summary; empty if there are none."""
    rows = []
    for name, dataset in (("left out", data.train_dataset), ("validation", data.val_dataset)):
        if dataset is not None and (text := left_out_text(dataset.plan)) is not None:
            rows.append((name, text if name == "left out" else f"left out: {text}"))
    return rows


def _ranks_text(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    return f"{trainer.world_size}{nodes}, {name}"


def _backend_rows(trainer: pl.Trainer, model: NestModel, data: NestDataModule) -> Rows:
    """Returns what computes the steps on a GPU; empty on a CPU, where it is always PyTorch."""
    plan, device = data.plan, trainer.strategy.root_device
    if device.type != "cuda":
        return []
    name, num_shapes = model.backend_name, plan.config.num_shapes
    backend = choose_backend(name, model.config, device, trainer.precision, num_shapes, plan.shapes)
    return [("backend", f"{backend}{backend.notes}")]


def _start_text(run: Run) -> str:
    if run.ckpt_path is not None:
        return f"from step {run.first_step:,}, {run.ckpt_path}"
    unfinished = unfinished_run(run.config.output)
    return "from step 0" + (f"; {unfinished}, and --resume goes on from there" if unfinished else "")


def format_summary(rows: Rows, width: int) -> str:
    """Returns the rows as aligned lines; a text that is too long continues on the next lines.

    Args:
        rows: Names and texts.
        width: Columns of the terminal.
    """
    return "\n".join(
        textwrap.fill(
            text,
            max(_MIN_WIDTH, width),
            initial_indent=name.ljust(_NAME_WIDTH),
            subsequent_indent=" " * _NAME_WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in rows
    )


def print_results(trainer: pl.Trainer, seconds: float) -> None:
    """Prints the last metrics of a run, what has ended it, where its output is, and what may come next, to stdout.

    Args:
        trainer: The trainer of the run, after `fit`.
        seconds: Duration of this start.
    """
    directory = trainer.log_dir
    if not trainer.is_global_zero or directory is None or cast(Any, trainer).fast_dev_run:
        return
    print(redacted("\n".join(_result_lines(trainer, Path(directory), seconds))))


def _result_lines(trainer: pl.Trainer, directory: Path, seconds: float) -> list[str]:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    steps_per_epoch = cast(Any, trainer).datamodule.plan.steps_per_epoch
    num_steps = num_steps_of_run(trainer, steps_per_epoch)
    is_finished = num_steps is None or trainer.global_step >= num_steps
    step = f"step {trainer.global_step:,}" + ("" if is_finished else f" of {num_steps:,}")
    parts = [f"{step} after {format_duration(seconds)}"]
    for stage, label in (("train", "loss"), ("val", "validation loss")):
        if f"{stage}_loss" in metrics:
            loss, entropy = metrics[f"{stage}_loss"], metrics[f"{stage}_token_entropy"]
            is_scored = not math.isnan(loss)
            parts.append(f"{label} {loss:.3f} (token entropy {entropy:.3f})" if is_scored else f"no {label}")
    outputs = {name: directory / path for name, path in _OUTPUTS.items()}
    lines = [f"{'finished' if is_finished else 'stopped before its end'}: {', '.join(parts)}"]
    requests = cast(Any, trainer).lightning_module.stop_requests
    if not is_finished and (reason := end_reason(trainer, requests)) is not None:
        lines.append(f"reason: {reason}")
    lines += [f"{name}: {path}" for name, path in outputs.items() if path.exists()]
    last = directory / "checkpoints" / "last.ckpt"
    if last.exists():
        model, config = shlex.quote(str(last)), cast(Any, trainer).lightning_module.config
        encoder = config.encoder
        is_own = isinstance(encoder, ClassConfig)
        is_live = not is_own and encoder.causal_downsampling and any(map(config.delay_s, encoder.att_context_size))
        to = "safetensors" if is_own else "onnx-streaming" if is_live else "huggingface"
        if is_own and encoder.init_args is None:
            return [*lines, f"next: nestmodel.load_network({str(last)!r}, encoder=...), with an equal object"]
        lines += [
            f"next: nestmodel features {model} talks/ -o talks.features",
            f"  or: nestmodel export {model} --to {to}",
        ]
    return lines


def end_reason(trainer: pl.Trainer, requests: StopRequests) -> str | None:
    """Returns what has ended a run before its last step; None if no request and no callback has.

    Args:
        trainer: The trainer of the run, after `fit`.
        requests: The requests of its model.
    """
    if requests.must_finish:
        return "trainer.max_time has passed"
    if not trainer.should_stop:
        return None
    callbacks = cast(Any, trainer).callbacks
    reasons = [callback.stopping_reason_message for callback in callbacks if isinstance(callback, EarlyStopping)]
    return next((reason for reason in reasons if reason), "a callback has set trainer.should_stop")
