import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nestdata import OutputError
from nestmodel import ConfigError, WeightsError, average_models, load_network, newest_checkpoint
from nestmodel.training.metrics_file import MetricsFile
from nestmodel.training.saving import run_folders
from nestmodel.training.saving.checkpoint_files import link_last, list_checkpoints
from nestmodel.training.saving.resume import check_resumes, find_resumed
from nestmodel.training.saving.run_folders import check_checkpoint_folder, only_start, unfinished_run
from tests.nestmodel.training.saving.checkpoints import written


def test_starts_at_the_same_time_have_a_folder_each(tmp_path: Path) -> None:
    (tmp_path / "version_3").write_text("of a user")
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(lambda _: MetricsFile(tmp_path).claim(), range(64)))
    assert sorted(int(path.name.removeprefix("version_")) for path in made) == list(range(4, 68))
    assert (tmp_path / "version_3").read_text() == "of a user"


def test_a_folder_of_checkpoints_is_used_by_one_start_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "_WAIT_S", 0.0)
    with only_start(tmp_path):
        with pytest.raises(OutputError, match="another run is writing it"), only_start(tmp_path):
            pytest.fail("the block ran")
        with only_start(tmp_path / "other"), only_start(None):
            pass
    with only_start(tmp_path):
        pass


def test_a_run_does_not_replace_the_checkpoints_of_another(tmp_path: Path) -> None:
    check_checkpoint_folder(tmp_path / "missing", None)
    path = written(tmp_path / "shared" / "step_00000004.ckpt")
    elsewhere = written(tmp_path / "other" / "step_00000004.ckpt")
    for resumed in (None, elsewhere):
        with pytest.raises(ConfigError, match=r"shared: has checkpoints of another run, .*--resume"):
            check_checkpoint_folder(path.parent, resumed)
    check_checkpoint_folder(path.parent, path)
    check_checkpoint_folder(None, None)


def test_last_ckpt_alone_is_enough_to_resume(tmp_path: Path) -> None:
    path = written(tmp_path / "run" / "version_2" / "checkpoints" / "step_00000012.ckpt")
    link_last(path)
    for copy in (tmp_path / "there" / "version_0" / "checkpoints", tmp_path / "flat"):
        copy.mkdir(parents=True)
        (copy / "last.ckpt").write_bytes((path.parent / "last.ckpt").read_bytes())
    assert newest_checkpoint(tmp_path / "there") == tmp_path / "there" / "version_0" / "checkpoints" / "last.ckpt"
    assert newest_checkpoint(tmp_path / "flat") == tmp_path / "flat" / "last.ckpt"
    older, newer = (written(tmp_path / "flat" / f"step_{step:08d}.ckpt") for step in (8, 16))
    assert list_checkpoints(tmp_path / "flat") == [newer, tmp_path / "flat" / "last.ckpt", older]


def test_a_checkpoint_with_another_name_is_named(tmp_path: Path) -> None:
    written(tmp_path / "step_00000004.ckpt").rename(tmp_path / "best.ckpt")
    for must_exist in (False, True):
        with pytest.raises(ConfigError, match=r"best\.ckpt is there\. .*--ckpt-path"):
            find_resumed("last", tmp_path, must_exist=must_exist)


@pytest.mark.filterwarnings("ignore:.*It is skipped")
def test_a_checkpoint_with_any_changed_byte_is_skipped_or_the_same(tmp_path: Path) -> None:
    draw = random.Random(0)
    before, newest = (written(tmp_path / "checkpoints" / f"step_{step:08d}.ckpt", step) for step in (1, 2))
    content, state = newest.read_bytes(), load_network(newest).state_dict()
    num_skipped = 0
    for _ in range(60):
        at, size = draw.randrange(len(content)), draw.choice((1, 1, 4, 64, 5000))
        newest.write_bytes(content[:at] + draw.randbytes(size) + content[at + size :])
        found = newest_checkpoint(tmp_path)
        num_skipped += found == before
        if found == newest:  # bytes between the records of a zip file have no meaning
            loaded = load_network(newest).state_dict()
            assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    assert num_skipped > 50


@pytest.mark.filterwarnings("ignore:.*It is skipped")
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "checkpoints" / "step_00000001.ckpt")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="no checkpoint is whole"):
        find_resumed("last", tmp_path, must_exist=False)


def test_a_resume_with_other_settings_names_the_checkpoint_that_fits(tmp_path: Path) -> None:
    fits = written(tmp_path / "version_0" / "checkpoints" / "step_00000008.ckpt", lr="1")
    path = written(tmp_path / "version_1" / "checkpoints" / "step_00000009.ckpt", lr="2")
    folders = [path.parent, fits.parent]
    with pytest.raises(ConfigError, match=rf"^{path} was written .* add --ckpt-path {fits}"):
        check_resumes(path, {"lr": "1"}, folders)


def test_an_unfinished_run_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "version_0" / "checkpoints" / "step_00000004.ckpt")
    for num_steps, expected in ((8, f"{tmp_path}/version_0 stopped at step 4 of 8"), (4, None)):
        (path.parents[1] / "config.yaml").write_text(f"trainer: {{max_steps: {num_steps}}}")
        assert unfinished_run(tmp_path) == expected
    assert unfinished_run(tmp_path / "missing") is None


def test_weights_with_several_names_are_counted_once_in_an_average(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (written(tmp_path / f"step_0000000{step}.ckpt", step) for step in (1, 2))
    link_last(second)
    copy = tmp_path / "best.ckpt"
    copy.write_bytes(first.read_bytes())
    expected = load_network(average_models([first, second], tmp_path / "mean.ckpt")).state_dict()
    found = load_network(average_models([first, first, second, copy, tmp_path / "last.ckpt"], tmp_path / "all.ckpt"))
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    assert f"{tmp_path}/last.ckpt has the weights of {second}" in caplog.text


def test_the_other_ranks_wait_until_the_first_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folders, "_POLL_S", 0.01)
    monkeypatch.setattr(run_folders, "_WAIT_S", 5.0)
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with only_start(tmp_path):
        pass
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    order: list[str] = []

    def other_rank() -> None:
        run_folders._wait_for_first_rank(tmp_path / run_folders.LOCK)
        order.append("other")

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other_rank)
        time.sleep(0.1)
        order.append("first")
        with only_start(tmp_path):
            waiting.result()
    assert order == ["first", "other"]
