"""Checks the page for users of NeMo: every key that it names exists, and keys of the model mean the same."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nestcli.nestdata import main
from nestmodel import NestConfig, RunConfig
from nestmodel.formats.nemo_config import config_to_nemo

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "from-nemo.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| (.*?) \|", PAGE, re.MULTILINE)
MODEL_ROWS = [
    (nemo.strip("`"), ours.strip("`")) for nemo, ours in ROWS if re.fullmatch(r"`model\.config\.[\w.]+`", ours)
]
OTHER_VALUES = {
    "encoder.att_context_probs": (1.0,),
    "encoder.att_context_size": ((6, 2),),
    "encoder.att_context_style": "chunked_limited",
    "encoder.conv_context_size": "causal",
    "encoder.conv_kernel_size": 7,
    "encoder.conv_norm": "layer_norm",
    "optimizer.schedule": "cosine",
    "features.normalize": "NA",
    "features.window_length": 320,
    "masking.position": "post_conv",
    "quantizer.distance": "cosine",
    "quantizer.normalize": "per_feature",
}
"""Values of fields for which half and double of their value are not allowed."""


def dotted(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def other_value(name: str, value: Any) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(each / 2 for each in value)
    return value * 2 if isinstance(value, int) else value / 2 + 0.01


def base() -> NestConfig:
    """Returns a preset with a learning rate that every schedule takes."""
    config = NestConfig.preset("large")
    return replace(config, optimizer=replace(config.optimizer, lr=0.01))


def changed(config: NestConfig, name: str) -> NestConfig:
    """Returns the configuration with another value of one field."""
    section, field = name.split(".")
    part = getattr(config, section)
    if field == "att_context_style":  # the new style needs a limited context
        part = replace(part, att_context_size=OTHER_VALUES["encoder.att_context_size"])
    return replace(config, **{section: replace(part, **{field: other_value(name, getattr(part, field))})})


@pytest.mark.parametrize(("nemo", "ours"), MODEL_ROWS)
def test_a_field_of_the_model_sets_the_field_of_nemo(nemo: str, ours: str) -> None:
    config = base()
    before = dict(dotted(config_to_nemo(config), "model."))
    after = dict(dotted(config_to_nemo(changed(config, ours.removeprefix("model.config."))), "model."))
    assert before[nemo] != after[nemo]


def test_keys_of_data_and_trainer_exist() -> None:
    named = {key for _, ours in ROWS for key in re.findall(r"`((?:data|trainer|checkpoints)\.[\w.]+)`", ours)}
    assert len(named) >= 20
    for key in sorted(named):
        part: Any = RunConfig
        for name in key.split("."):
            hints = get_type_hints(part)
            assert name in hints, key
            part = hints[name]


def test_the_options_of_prepare_exist(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["prepare", "--help"]) == 0
    known = re.findall(r"--[\w-]+", capsys.readouterr().out)
    options = re.findall(r"`nestdata prepare (--[\w-]+)", PAGE)
    assert len(options) >= 4
    assert set(options) <= set(known)
