"""What a run is, in a checkpoint: its data and its settings; and whether another run may go on from there.

The number of ranks, of loader processes and of steps to make are no part of it: they may change.
"""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

import torch

from nestmodel.errors import ConfigError

Settings = dict[str, str]
"""Value by name, both as text, so that a checkpoint can be read without our classes."""

_ABSENT = "(not there)"
_SHOWN = 8


def flatten_settings(value: object, name: str) -> Settings:
    """Returns every field of nested configurations, lists and mappings by its dotted name."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {k: v for key, inner in value.items() for k, v in flatten_settings(inner, f"{name}.{key}").items()}
    return {name: repr(value)}


def check_unchanged(before: Settings, now: Settings) -> None:
    """Compares the settings of a checkpoint with those of the run that is to go on from it.

    Raises:
        ConfigError: They differ; the message says in what.
    """
    names = [name for name in {**before, **now} if before.get(name, _ABSENT) != now.get(name, _ABSENT)]
    if not names:
        return
    changes = [f"{name}: {before.get(name, _ABSENT)} -> {now.get(name, _ABSENT)}" for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        changes.append(f"and {len(names) - _SHOWN} more")
    raise ConfigError(
        f"the checkpoint is of a run with other data or settings ({'; '.join(changes)}). Give what it was made with; "
        "or start a new run from its weights with --model.init_from."
    )


def check_same_step(step: int, rank: int, device: torch.device) -> None:
    """Checks that all ranks go on from the same step: each has looked for its checkpoint by itself.

    Raises:
        ConfigError: They do not; on all ranks.
    """
    ends = torch.tensor([step, -step], device=device)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    last, first = int(ends[0]), -int(ends[1])
    if first != last:
        raise ConfigError(
            f"rank {rank} would go on from step {step}, others from {first} to {last}: they have found different "
            "checkpoints. Give all of them the same --ckpt_path, on a disk that all nodes see."
        )
