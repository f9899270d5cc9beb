"""`nestmodel fit`, `validate` and `preflight`: commands over the settings of a run."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml

from nestdata.wrong_path import wrong_path
from nestmodel.config import preset_names
from nestmodel.run_config import LAST, RunConfig

from ..options import AsJson, ConfigNames, config_names
from ..parsing import Unprefixed, UsageError, check_no_settings, option

PrintConfig = Annotated[bool, option(help="Print all settings as YAML, for --config, and exit.")]


def fit_command(arguments: Sequence[str]) -> Callable[..., Any]:
    """Returns the command `fit`, with the values of the configurations in the arguments as its defaults."""
    defaults = _defaults("fit", arguments)

    def fit(
        *,
        run: Annotated[RunConfig, Unprefixed] = defaults,
        config: ConfigNames = (),
        print_config: PrintConfig = False,
    ) -> None:
        if _is_printed(run, config, command="fit", print_config=print_config):
            return
        from nestmodel.run import fit as train

        train(run)

    return fit


def validate_command(arguments: Sequence[str]) -> Callable[..., Any]:
    """Returns the command `validate`, with the values of the configurations in the arguments as its defaults."""
    defaults = _defaults("validate", arguments)

    def validate(
        *,
        run: Annotated[RunConfig, Unprefixed] = defaults,
        config: ConfigNames = (),
        print_config: PrintConfig = False,
    ) -> None:
        if _is_printed(run, config, command="validate", print_config=print_config):
            return
        from nestmodel.run import validate as evaluate

        evaluate(run)

    return validate


def _defaults(command: str, arguments: Sequence[str]) -> RunConfig:
    """Returns the settings of the configurations that a command line names; without one, those that help shows."""
    if not arguments:
        raise UsageError(_no_configuration(command, None))
    return RunConfig.read(config_names(list(arguments)) or ["small"])


def _no_configuration(command: str, corpus: Path | None) -> str:
    what = "configuration" if corpus else "corpus and configuration"
    return (
        f"no {what}: give --config with a preset ({', '.join(preset_names())}) or a YAML file, such as `nestmodel "
        f"{command} {corpus or 'speech.corpus'} --config small`. `nestmodel presets` compares the presets."
    )


def _is_printed(run: RunConfig, names: Sequence[str], *, command: str, print_config: bool) -> bool:
    """Prints the settings if that was asked for, and checks what can be checked before torch is imported."""
    if not names:
        raise UsageError(_no_configuration(command, run.data.corpora[0] if run.data.corpora else None))
    if print_config:
        yaml.safe_dump(run.stored(), sys.stdout, sort_keys=False)
        return True
    check_no_settings(run.data.corpora)
    if not run.data.corpora:
        raise UsageError(
            f"no corpus: give one, such as `nestmodel {command} speech.corpus --config {names[0]}`. "
            "`nestdata prepare` makes corpora from audio."
        )
    for given in (*run.data.corpora, run.data.noise, run.data.val_corpus):
        if given is not None and not (given / "meta.json").exists():
            raise UsageError(f"{given}: {wrong_path(given, 'a corpus')}")
    if run.ckpt_path not in (None, LAST) and not Path(str(run.ckpt_path)).exists():
        raise UsageError(f"--ckpt-path {run.ckpt_path}: {wrong_path(str(run.ckpt_path), 'a model')}")
    return False


def preflight_command(arguments: Sequence[str]) -> Callable[..., Any]:
    """Returns the command `preflight`, with the values of the configurations in the arguments as its defaults."""
    from nestmodel import BudgetConfig, PreflightConfig

    defaults = _defaults("preflight", arguments)

    def preflight(
        *,
        run: Annotated[RunConfig, Unprefixed] = defaults,
        config: ConfigNames = (),
        checks: Annotated[PreflightConfig, Unprefixed] = PreflightConfig(),
        find_budget: Annotated[
            bool, option(help="Instead of the checks, find the largest --max-batch-seconds that fits.")
        ] = False,
        memory_limit: Annotated[
            str | None,
            option(metavar="SIZE", help="With --find-budget: memory of a rank, such as 8GiB; required on a CPU."),
        ] = None,
        memory_margin: Annotated[
            float, option(help="With --find-budget: share of the memory that stays free.")
        ] = BudgetConfig().memory_margin,
        as_json: AsJson = False,
        print_config: PrintConfig = False,
    ) -> int:
        if _is_printed(run, config, command="preflight", print_config=print_config):
            return 0
        from .preflight import run_budget, run_checks

        if find_budget:
            limits = BudgetConfig(memory_limit=memory_limit, memory_margin=memory_margin, timeout_s=checks.timeout_s)
            return run_budget(run, limits, as_json=as_json)
        if memory_limit is not None:
            raise UsageError("--memory-limit has no effect without --find-budget: add it, or leave both out.")
        return run_checks(replace(run, quiet=True), checks, as_json=as_json)

    return preflight
