"""Commands of manifests and corpora are run if they are allowed, where they are, and by nobody else."""

import inspect
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import nestdata
import nestmodel
from nestdata import ConfigError, Corpora, Corpus, PrepareConfig, pack_corpora, prepare_corpus, verify_corpus
from tests.synthesis import hiss, read_audio, write_audio


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    """Returns a Kaldi directory with one command, which counts its runs in the file `runs`."""
    write_audio(tmp_path / "a.wav", hiss(8000, 1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wav.scp").write_text(f"u1 echo >> {tmp_path}/runs; cat {tmp_path}/a.wav |\n")
    return tmp_path / "data"


def num_runs(pipes: Path) -> int:
    return len((pipes.parent / "runs").read_text().splitlines())


def test_an_allowed_command_is_run_by_every_reader(tmp_path: Path, pipes: Path) -> None:
    prepare_corpus([pipes], tmp_path / "out", PrepareConfig(allow_commands=True, report_samples=0))
    expected = read_audio(tmp_path / "a.wav")
    opened = Corpus.open(tmp_path / "out", allow_commands=True)
    for corpus in (opened, pickle.loads(pickle.dumps(opened)), Corpora.open([tmp_path / "out"], allow_commands=True)):
        before = num_runs(pipes)
        np.testing.assert_array_equal(corpus.load(0)[1], expected)
        assert num_runs(pipes) == before + 1
    assert verify_corpus(tmp_path / "out", checksums=True, allow_commands=True).num_checked == 1
    assert pack_corpora([tmp_path / "out"], tmp_path / "packed", allow_commands=True).num_cuts == 1
    with pytest.raises(ConfigError, match="--allow-commands"):
        Corpus.open(tmp_path / "out").load(0)


def test_no_public_function_or_class_runs_commands_unless_it_is_told_to() -> None:
    public = [getattr(package, name) for package in (nestdata, nestmodel) for name in package.__all__]
    methods = [
        each for owner in public if inspect.isclass(owner) for _, each in inspect.getmembers(owner, inspect.isroutine)
    ]
    defaults = []
    for function in filter(callable, public + methods):
        with suppress(ValueError):  # a built-in function without a signature
            found = inspect.signature(function).parameters.get("allow_commands")
            defaults += [] if found is None else [found.default]
    assert len(defaults) > 8
    assert set(defaults) == {False}


def test_a_sample_bank_needs_no_command(tmp_path: Path, pipes: Path) -> None:
    prepare_corpus([pipes], tmp_path / "out", PrepareConfig(allow_commands=True, pcm=True, report_samples=0))
    before = num_runs(pipes)
    np.testing.assert_array_equal(Corpus.open(tmp_path / "out").load(0)[1], read_audio(tmp_path / "a.wav"))
    assert pack_corpora([tmp_path / "out"], tmp_path / "packed").num_cuts == 1
    assert num_runs(pipes) == before
