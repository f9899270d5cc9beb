"""What `fit` prints at its end: the last metrics, what has ended the run, where its output is, what may come next."""

import math
import shlex
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping

from nestdata import redacted
from nestmodel.class_config import ClassConfig
from nestmodel.training.run_state import format_duration
from nestmodel.training.step_limits import num_steps_of_run
from nestmodel.training.step_stats import StopRequests

_OUTPUTS = {"metrics": "metrics.csv", "curves": "curves.png", "checkpoints": "checkpoints"}


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
