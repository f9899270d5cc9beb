"""What `fit` shows besides errors: a summary, progress on a terminal or as lines, and the results."""

import logging
import math
import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping

import nestmodel
from nestdata import redacted
from nestmodel.class_config import ClassConfig
from nestmodel.training.callbacks.live_panel import LivePanel, terminal
from nestmodel.training.callbacks.progress import PlainLines, Renderer
from nestmodel.training.run_state import format_duration
from nestmodel.training.starting.run_summary import Rows, few_steps_rows, format_summary, left_out_rows, summarise_run
from nestmodel.training.step_limits import num_steps_of_run
from nestmodel.training.step_stats import StopRequests

if TYPE_CHECKING:
    from nestmodel.run import Run

_OUTPUTS = {"metrics": "metrics.csv", "curves": "curves.png", "checkpoints": "checkpoints"}
_PACKAGE = os.path.join(os.path.dirname(nestmodel.__file__), "")

_NOT_SHOWN = (
    # Lightning causes this one; users cannot avoid it.
    ".*LeafSpec.*is deprecated",
    "Be aware that when using .*ckpt_path",
    # SLURM is installed, and this run is outside it; `check_start` finds a job whose tasks do not fit.
    "The `srun` command is available on your system but is not used",
    # The interval counts steps of the run; Lightning compares it with the steps of an epoch.
    "The number of training batches .* is smaller than the logging interval",
    # metrics.csv needs no other logger.
    ".*tensorboard.*has been removed as a dependency",
)

_SMALL_FOR_A_CPU = 5e6
"""Parameters of a model that learns on a CPU within minutes."""


def silence_libraries() -> None:
    """Filters Lightning's warnings that a user can do nothing about, and its log records below WARNING.

    Those of `nestmodel`, which has the same loggers, pass.
    """
    for message in _NOT_SHOWN:
        warnings.filterwarnings("ignore", message=message)
    for name in ("pytorch_lightning", "lightning_fabric"):
        for handler in logging.getLogger(name).handlers:
            if _is_shown not in handler.filters:
                handler.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.pathname.startswith(_PACKAGE)


def renderer() -> Renderer:
    """Returns how progress is shown: by a panel on a terminal, and by lines elsewhere."""
    console = terminal()
    return LivePanel(console) if console else PlainLines()


def print_summary(run: "Run") -> None:
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


def print_left_out(run: "Run") -> None:
    """Prints the cuts that are too long or too short for the plan to stderr, on rank 0."""
    _print_rows(run, left_out_rows(run.data))


def print_plan_notes(run: "Run") -> None:
    """Prints what a person may not expect of the plan of training to stderr, on rank 0: cuts left out, few steps."""
    _print_rows(run, [*left_out_rows(run.data), *few_steps_rows(run.data)])


def _print_rows(run: "Run", rows: Rows) -> None:
    if run.trainer.is_global_zero:
        for name, text in rows:
            print(f"{name}: {text}", file=sys.stderr)


def print_nothing_to_train(run: "Run") -> None:
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


def print_results(trainer: pl.Trainer, seconds: float) -> None:
    """Prints the last metrics of a run, what has ended it, where its output is, and what may come next, to stdout.

    Args:
        trainer: Of the run, after `fit`.
        seconds: Duration of this start.
    """
    directory = trainer.log_dir
    if not trainer.is_global_zero or directory is None or cast(Any, trainer).fast_dev_run:
        return
    print(redacted("\n".join(_result_lines(trainer, Path(directory), seconds))))


def _result_lines(trainer: pl.Trainer, directory: Path, seconds: float) -> list[str]:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    steps_per_epoch = cast(Any, trainer).datamodule.train_dataset.plan.steps_per_epoch
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
        trainer: Of the run, after `fit`.
        requests: Of its model.
    """
    if requests.must_finish:
        return "trainer.max_time has passed"
    if not trainer.should_stop:
        return None
    callbacks = cast(Any, trainer).callbacks
    reasons = [callback.stopping_reason_message for callback in callbacks if isinstance(callback, EarlyStopping)]
    return next((reason for reason in reasons if reason), "a callback has set trainer.should_stop")
