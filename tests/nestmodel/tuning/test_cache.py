import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nestmodel.nn.gpu.kernel_choice import PARTS, Kernels
from nestmodel.tuning import cache
from nestmodel.tuning.cache import Result, cache_key, cache_path, read_result, write_result
from nestmodel.tuning.parts import Setting
from nestmodel.tuning.race import Row
from tests.training import tiny_config

RESULT = Result(
    device="a GPU",
    kernels=Kernels(features="torch", subsampling="triton", blocks="compiled", step="torch"),
    rows=(
        Row(part="blocks", form="torch", verdict="slower", seconds=2e-3, error=1e-2, allowed=3e-2),
        Row(part="blocks", form="compiled", verdict="taken", seconds=1e-3, error=1e-2, allowed=3e-2),
        Row(part="features", form="compiled", verdict="failed", reason="out of memory"),
    ),
)
SETTING = Setting(config=tiny_config(), num_cuts=3, num_samples=16000, num_shapes=8, precision="bf16-mixed")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nestmodel" / "kernels.json"


def test_results_are_read_as_they_were_written(path: Path) -> None:
    assert read_result("first") is None
    write_result("first", RESULT)
    write_result("second", replace(RESULT, device="another GPU"))
    assert read_result("first") == RESULT
    assert read_result("second") == replace(RESULT, device="another GPU")
    assert read_result("third") is None
    assert os.listdir(path.parent) == ["kernels.json"]


def test_the_cache_is_in_the_users_cache_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_path() == path
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_path() == Path.home() / ".cache" / "nestmodel" / "kernels.json"


def changed(entry: dict[str, Any], **values: object) -> str:
    return json.dumps({"key": {**entry, **values}})


ENTRY = json.loads(json.dumps(asdict(RESULT)))
ROW = ENTRY["rows"][0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "\x00",
        "[" * 100_000,
        '{"key": 3}',
        '{"key": {}}',
        changed(ENTRY, more=1),
        changed(ENTRY, device=3),
        changed(ENTRY, rows={}),
        changed(ENTRY, rows=[3]),
        changed(ENTRY, rows=[{**ROW, "more": 1}]),
        changed(ENTRY, rows=[{**ROW, "seconds": "1"}]),
        changed(ENTRY, rows=[{**ROW, "verdict": "best"}]),
        changed(ENTRY, rows=[{**ROW, "verdict": []}]),
        changed(ENTRY, rows=[{**ROW, "form": None}]),
        changed(ENTRY, kernels=None),
        changed(ENTRY, kernels={"blocks": "torch"}),
        changed(ENTRY, kernels={**ENTRY["kernels"], "blocks": "auto"}),
        changed(ENTRY, kernels={**ENTRY["kernels"], "blocks": "fast"}),
        changed(ENTRY, kernels={**ENTRY["kernels"], "blocks": ["torch"]}),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(content: str, path: Path) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.warns(UserWarning, match="kernels.json: ignored, because it is damaged or cannot be read"):
        assert read_result("key") is None
    write_result("key", RESULT)
    assert read_result("key") == RESULT


def test_a_file_that_is_too_large_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_result("key", RESULT)
    monkeypatch.setattr(cache, "_MAX_BYTES", path.stat().st_size - 1)
    with pytest.warns(UserWarning, match="it has more than"):
        assert read_result("key") is None


def test_a_directory_that_cannot_be_written_is_a_warning(path: Path) -> None:
    path.parent.write_text("a file in the place of the directory")
    with pytest.warns(UserWarning, match="the choice of kernels is not kept for the next run"):
        write_result("key", RESULT)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert read_result("key") is None


def test_the_key_changes_with_everything_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        cache_key(SETTING, "a GPU", False, PARTS, Kernels()),
        cache_key(SETTING, "another GPU", False, PARTS, Kernels()),
        cache_key(SETTING, "a GPU", True, PARTS, Kernels()),
        cache_key(SETTING, "a GPU", False, PARTS[:1], Kernels()),
        cache_key(SETTING, "a GPU", False, PARTS, Kernels(blocks="compiled")),
        cache_key(replace(SETTING, num_cuts=4), "a GPU", False, PARTS, Kernels()),
        cache_key(replace(SETTING, num_shapes=None), "a GPU", False, PARTS, Kernels()),
        cache_key(replace(SETTING, precision="32-true"), "a GPU", False, PARTS, Kernels()),
        cache_key(replace(SETTING, config=tiny_config(d_model=32)), "a GPU", False, PARTS, Kernels()),
    ]
    assert cache_key(SETTING, "a GPU", False, PARTS, Kernels()) == keys[0]
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    keys.append(cache_key(SETTING, "a GPU", False, PARTS, Kernels()))
    monkeypatch.setattr(cache, "source_digest", lambda package: f"other code of {package}")
    keys.append(cache_key(SETTING, "a GPU", False, PARTS, Kernels()))
    assert len(set(keys)) == len(keys)


def test_without_a_home_directory_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["no such user"])
    with pytest.warns(UserWarning, match=r"kernels\.json: ignored"):
        assert read_result("key") is None
    with pytest.warns(UserWarning, match="not kept for the next run"):
        write_result("key", RESULT)


def test_the_seed_and_the_optimizer_need_no_race_of_their_own() -> None:
    key = cache_key(SETTING, "a GPU", False, PARTS, Kernels())
    config = replace(SETTING.config, seed=7, optimizer=replace(SETTING.config.optimizer, lr=1.0))
    assert cache_key(replace(SETTING, config=config), "a GPU", False, PARTS, Kernels()) == key
