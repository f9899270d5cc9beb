"""How benchmarks pretrain the preset `demo` on two cores: the settings, and the command as a user types it."""

from pathlib import Path

from benchmarks.harness.children import run_command

SETTINGS = {
    # The operations are small: two ranks of one thread each process twice as much audio as one rank of two threads.
    "trainer.accelerator": "cpu",
    "trainer.strategy": "ddp",
    "trainer.devices": 2,
    "data.plan.microbatches_per_step": 2,
    "data.plan.max_batch_seconds": 45,
    "trainer.max_steps": 100000,
    "trainer.val_check_interval": 250,
    "trainer.log_every_n_steps": 20,
    "model.config.optimizer.lr": 0.3,
    "model.config.optimizer.warmup_steps": 400,
}


def fit_command(corpus: str, minutes: int, *, val_corpus: str | None = None) -> str:
    """Returns the command that trains for some minutes on a corpus, and writes to `run`.

    Args:
        corpus: Speech to learn from.
        minutes: Time limit.
        val_corpus: Corpus on which the loss is measured; None for no validation.
    """
    settings = {name: value for name, value in SETTINGS.items() if val_corpus or "val_check" not in name}
    overrides = " ".join(f"--{name} {value}" for name, value in settings.items())
    validation = f"--val-corpus {val_corpus} " if val_corpus else ""
    return (
        f"nestmodel fit {corpus} --config demo --noise noise.corpus {validation}"
        f"--output run --max-time {minutes}m {overrides}"
    )


def prepare(manifest: str, output: Path, options: str = "--max-seconds 30") -> None:
    """Prepares the corpus of NAME.json in a folder."""
    name = manifest.removesuffix(".json")
    run_command(f"nestdata prepare {manifest} -o {name}.corpus {options} --overwrite", output, echo=True)
