"""A checkpoint of a tiny model, written without training."""

from dataclasses import asdict, replace
from pathlib import Path

from nestmodel import NestNetwork
from nestmodel.training.saving.checkpoint_files import write_checkpoint
from tests.training import tiny_config


def written(path: Path, seed: int = 0, **settings: str) -> Path:
    """Writes a checkpoint of a run, whose step is in its name."""
    config, step = tiny_config(), int(path.stem.removeprefix("step_"))
    state = NestNetwork(replace(config, seed=seed)).state_dict()
    write_checkpoint(
        {"nest_config": asdict(config), "state_dict": state, "global_step": step, "nest_settings": settings}, path
    )
    return path
