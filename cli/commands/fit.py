"""`nestmodel fit`, `validate` and `preflight`: commands over the settings of a run."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import yaml

from nestdata.wrong_path import wrong_path
from nestmodel import BudgetConfig, PreflightConfig
from nestmodel.config_files import preset_names
from nestmodel.run_config import LAST, RunConfig

from ..options import AsJson, ConfigNames
from ..parsing import Unprefixed, UsageError, option

RunSettings = Annotated[RunConfig, Unprefixed]
PrintConfig = Annotated[bool, option(help="Print all settings as YAML, for --config, and exit.")]


def fit_command(*, run: RunSettings, config: ConfigNames = (), print_config: PrintConfig = False) -> None:
    """Train a model on corpora, with the settings of a preset or a YAML file."""
    if is_to_run("fit", run, config, print_config=print_config):
        from nestmodel.run import fit

        fit(run)


def validate_command(*, run: RunSettings, config: ConfigNames = (), print_config: PrintConfig = False) -> None:
    """Evaluate a checkpoint on the validation corpus."""
    if is_to_run("validate", run, config, print_config=print_config):
        from nestmodel.run import validate

        validate(run)


def preflight_command(
    *,
    run: RunSettings,
    config: ConfigNames = (),
    checks: Annotated[PreflightConfig, Unprefixed] = PreflightConfig(),
    find_budget: Annotated[
        bool, option(help="Instead of the checks, find the largest --max-batch-seconds that fits.")
    ] = False,
    budget: Annotated[BudgetConfig, Unprefixed] = BudgetConfig(),
    as_json: AsJson = False,
    print_config: PrintConfig = False,
) -> int:
    """Check ranks, disks, audio, memory and network with the options of fit."""
    if not is_to_run("preflight", run, config, print_config=print_config):
        return 0
    from .preflight import run_budget, run_checks

    if find_budget:
        run_budget(run, replace(budget, timeout_s=checks.timeout_s), as_json=as_json)
        return 0
    if budget.memory_limit is not None:
        raise UsageError("--memory-limit has no effect without --find-budget: add it, or leave both out.")
    return run_checks(run, checks, as_json=as_json)


def print_settings(run: RunConfig) -> None:
    """Prints all settings as YAML."""
    yaml.safe_dump(run.stored(), sys.stdout, sort_keys=False)


def is_to_run(command: str, run: RunConfig, names: Sequence[str], *, print_config: bool) -> bool:
    """Returns whether a command has to run; with `--print-config`, its settings are printed instead.

    Raises:
        UsageError: No configuration is named, or corpora or checkpoints are not there: found before torch is imported.
    """
    corpora = run.data.corpora
    if not names:
        raise UsageError(
            f"no {'configuration' if corpora else 'corpus and configuration'}: give --config with a preset "
            f"({', '.join(preset_names())}) or a YAML file, such as `nestmodel {command} "
            f"{corpora[0] if corpora else 'speech.corpus'} --config small`. `nestmodel presets` compares the presets."
        )
    if print_config:
        print_settings(run)
        return False
    if not corpora:
        raise UsageError(
            f"no corpus: give one, such as `nestmodel {command} speech.corpus --config {names[0]}`. "
            "`nestdata prepare` makes corpora from audio."
        )
    for given in (*corpora, run.data.noise, run.data.val_corpus):
        if given is not None and not (given / "meta.json").exists():
            raise UsageError(f"{given}: {wrong_path(given, 'a corpus')}")
    if run.ckpt_path not in (None, LAST) and not Path(str(run.ckpt_path)).exists():
        raise UsageError(f"--ckpt-path {run.ckpt_path}: {wrong_path(str(run.ckpt_path), 'a model')}")
    return True
