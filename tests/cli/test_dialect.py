from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml

from nestcli import nestmodel
from nestcli.arguments.dialect import translate
from nestcli.arguments.errors import UsageError
from nestcli.arguments.keys import is_unknown, key_groups, keys
from nestcli.arguments.settings import GROUPS, LIGHTNING_COMMANDS, SETTINGS
from nestcli.arguments.suggestions import OTHER_NAMES, option_hint
from nestcli.commands.preflight import PreflightTrainer
from nestmodel import preset_names, preset_path
from tests.cli.parsers import key_lines, lightning_parsers
from tests.conftest import MessyCorpora

RESERVED = ("log",)

LR = "--model.config.optimizer.lr"
DEMO = f"--config={preset_path('demo')}"


@pytest.fixture(scope="module")
def parsers() -> dict[str, Any]:
    return lightning_parsers()


def translated(*arguments: str) -> list[str]:
    """Returns what follows the command and the configuration."""
    command, config, *others = translate(["fit", "--config", "demo", *arguments])
    assert (command, config) == ("fit", DEMO)
    return others


def test_the_keys_are_those_of_the_real_parser() -> None:
    listed = sorted([*keys(), *(f"{group}." for group in key_groups())])
    assert listed == sorted({*key_lines(), *RESERVED}), "run `python -m tests.cli.parsers > cli/keys.txt`"


def test_every_setting_has_a_key_and_the_default_of_the_real_parser(parsers: dict[str, Any]) -> None:
    for setting in SETTINGS:
        assert setting.group in GROUPS
        for command in setting.commands if setting.key not in RESERVED else ():
            action = parsers[command]._option_string_actions[f"--{setting.key}"]
            is_shown = setting.default is not None and action.default is not None
            assert not is_shown or action.default == setting.default, setting.key
    assert {parameter for parameter in signature(PreflightTrainer.preflight).parameters} <= {
        *(setting.key for setting in SETTINGS),
        *("self", "model", "datamodule", "weights_only"),
    }


def test_an_option_is_the_last_part_of_its_key() -> None:
    others = {"CORPUS", "mix-prob", "output", "resume", "seed"}
    for setting in SETTINGS:
        if setting.option not in others:
            assert setting.option.replace("-", "_") == setting.key.rpartition(".")[2]
    for command in LIGHTNING_COMMANDS:
        options = [setting.option for setting in SETTINGS if command in setting.commands]
        letters = [setting.letter for setting in SETTINGS if command in setting.commands and setting.letter]
        assert len({*options, *letters}) == len(options) + len(letters)


def test_the_table_says_which_settings_presets_have() -> None:
    contents = [yaml.safe_load(preset_path(name).read_text(encoding="utf-8")) for name in preset_names()]

    def has(content: object, key: str) -> bool:
        for part in key.split("."):
            if not isinstance(content, dict) or part not in content:
                return False
            content = content[part]
        return True

    for setting in SETTINGS:
        assert any(has(content, setting.key) for content in contents) == setting.in_presets, setting.key


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.corpus"], ["--data.corpus=a.corpus"]),
        (["a", "--max-steps", "3", "b"], ['--data.corpus=["a", "b"]', "--trainer.max_steps=3"]),
        (["a", "--max_batch-seconds=3"], ["--data.corpus=a", "--data.plan.max_batch_seconds=3"]),
        (["a", "--data.plan.max-batch-seconds", "3"], ["--data.corpus=a", "--data.plan.max_batch_seconds=3"]),
        (["a", "--trainer.max-steps=3"], ["--data.corpus=a", "--trainer.max_steps=3"]),
        (["a", "-o", "runs/x"], ["--data.corpus=a", "--trainer.default_root_dir=runs/x"]),
        (["a", "-oruns/x"], ["--data.corpus=a", "--trainer.default_root_dir=runs/x"]),
        (["a", "-o=runs/x"], ["--data.corpus=a", "--trainer.default_root_dir=runs/x"]),
        (["a", "--seed", "7"], ["--data.corpus=a", "--seed_everything=7"]),
        (["a", "--mix-prob", "0.3"], ["--data.corpus=a", "--data.mix.prob=0.3"]),
        (["a", "--weights", "0.7,0.3"], ["--data.corpus=a", "--data.plan.weights=[0.7,0.3]"]),
        (["a", "--max-steps", "-1"], ["--data.corpus=a", "--trainer.max_steps=-1"]),
        (["a", "--resume"], ["--data.corpus=a", "--ckpt_path=last!"]),
        (["--data.corpus=a", "--lr", "3", "--lr", "4"], ["--data.corpus=a", f"{LR}=3", f"{LR}=4"]),
        (["a", "--max-steps", "3", "--trainer.max_steps", "3"], ["--data.corpus=a", *2 * ["--trainer.max_steps=3"]]),
        (["--lr", "1", "--", "-a"], [f"{LR}=1", "--data.corpus=-a"]),
        (["a", "--data.corpus+", "b"], ["--data.corpus=a", "--data.corpus+=b"]),
        (
            ["a", "--trainer.callbacks.init_args.every-n-steps", "3"],
            ["--data.corpus=a", "--trainer.callbacks.init_args.every_n_steps=3"],
        ),
        (["--print-config"], ["--print_config"]),
    ],
)  # fmt: skip
def test_options_are_translated_to_keys(arguments: list[str], expected: list[str]) -> None:
    assert translated(*arguments) == expected


def test_options_override_files_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {corpus: a}\n")
    found = translate(["fit", "--max-steps", "3", "-c", "demo", "--lr=1", f"-c{tmp_path / 'run.yaml'}"])
    assert found == [
        *("fit", DEMO, f"--config={tmp_path / 'run.yaml'}"),
        *("--trainer.max_steps=3", f"{LR}=1"),
    ]


@pytest.mark.parametrize(
    "name", ["[a]", "null", "12", "a: b", "{a", "a, b", "a'b\"c", "a\tb", "日本", "\U0001f600", "$(touch x)", "-a"]
)
def test_any_file_name_reaches_the_configuration(name: str, parsers: dict[str, Any]) -> None:
    for names in ([name], [name, "b"]):
        config = parsers["fit"].parse_args(translate(["fit", "--config", "demo", "--", *names])[1:])
        assert config.data.corpus in (Path(name), [Path(name) for name in names])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--max-steps", "3", "--trainer.max_steps", "4"], "--max-steps and --trainer.max_steps both set trainer"),
        (["a", "--data.corpus", "b"], "CORPUS and --data.corpus both set data.corpus"),
        (["a", "--resume", "--ckpt-path", "x.ckpt"], "--resume and --ckpt-path both set ckpt_path"),
        (["a", "--seed", "1", "--seed_everything", "2"], "--seed and --seed_everything both set seed_everything"),
        (["a", "--conf", "demo"], "unknown option --conf; the nearest is --config."),
        (["a", "--max_step", "3"], "unknown option --max_step; the nearest is --max-steps."),
        (["a", "--gpus", "3"], "unknown option --gpus; here it is --devices."),
        (["a", "--d-model", "3"], "the nearest is --model.config.encoder.d_model."),
        (["a", "--data.pln.max_cuts", "3"], "the nearest is 'data.plan.max_cuts'"),
        (["a", "--data.plan.max_batch_secs", "3"], "the nearest is 'data.plan.max_batch_seconds'"),
        (["a", "--max-steps"], "--max-steps needs a value."),
        (["a", "--max-steps", "--lr", "3"], "--max-steps needs a value."),
        (["a", "-x"], "unknown option -x."),
        (["a", "--data.plan.seed", "3"], "--data.plan.seed follows from --seed"),
        (["--data", "speech.corpus"], "give corpora without an option, such as `nestmodel fit speech.corpus"),
        ([], "no corpus: give one (data.corpus), such as `nestmodel fit speech.corpus --config small`"),
    ],
)
def test_a_mistake_is_named_with_the_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        translated(*arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a corpus and a configuration, such as `nestmodel fit speech.corpus --config small`"),
        (["a"], "no configuration: give --config with a preset (demo, large, medium, small, xlarge)"),
    ],
)
def test_without_a_configuration_the_presets_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        translate(["fit", *arguments])
    assert message in str(error.value)


def test_preflight_takes_the_options_of_fit() -> None:
    arguments = ["a", "-c", "demo", "--max-steps", "3", "--ckpt-path", "x.ckpt", "--lr", "1"]
    fit, preflight = (translate([command, *arguments])[1:] for command in ("fit", "preflight"))
    assert fit == preflight
    assert translate(["preflight", *arguments, "--find-budget", "--json"])[-2:] == [
        "--find_budget=true",
        "--json=true",
    ]


def test_keys_are_enough_instead_of_files(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("corpus: a\n")
    arguments = ["fit", "--data", str(tmp_path / "data.yaml"), "--model.config.encoder.d_model=8"]
    assert translate(arguments)[1:] == [f"--data={tmp_path / 'data.yaml'}", "--model.config.encoder.d_model=8"]


def test_keys_of_classes_are_left_to_lightning() -> None:
    assert is_unknown("data.plan.max_cut")
    assert is_unknown("model.d_model")
    for key in ("trainer.new", "data.plan", "data.corpus+", "trainer.logger.init_args.x", "data.augment.speech.0"):
        assert not is_unknown(key)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_of_another_tool_leads_to_an_option(name: str) -> None:
    assert OTHER_NAMES[name] in {setting.option for setting in SETTINGS}
    assert option_hint(f"--{name}", "fit").startswith("; here it is ")


def test_a_run_by_short_options_has_the_settings_of_the_keys(
    messy_corpora: MessyCorpora, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [str(messy_corpora.speech), str(messy_corpora.windows), "--noise", str(messy_corpora.noise)]
    short += ["-c", "demo", "--max-steps", "5", "--lr=2", "--weights", "0.7,0.3", "-o", str(tmp_path)]
    long = [f"--data.corpus=[{messy_corpora.speech}, {messy_corpora.windows}]", "--config", "demo"]
    long += ["--data.noise", str(messy_corpora.noise), "--trainer.max_steps=5", "--model.config.optimizer.lr", "2"]
    long += ["--data.plan.weights=[0.7, 0.3]", "--trainer.default_root_dir", str(tmp_path)]
    printed = []
    for arguments in (short, long):
        with pytest.raises(SystemExit):
            nestmodel.main(["fit", *arguments, "--print_config"])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert yaml.safe_load(printed[0])["data"]["plan"]["weights"] == [0.7, 0.3]
