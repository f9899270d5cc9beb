"""Transforms that Lhotse puts into manifests: equal samples at every load and in every process, or a refusal."""

import os
import subprocess
import sys
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
import torch
from lhotse import CutSet, Recording

from nestdata import ConfigError, Corpus, ManifestError, PrepareConfig, prepare_corpus
from nestdata.audio import lhotse_audio
from nestdata.audio.decode import load_samples
from tests.synthesis import chirp, hiss, read_jsonl, write_audio, write_jsonl

Change = Callable[[Recording], Recording]

# The methods of Lhotse that put a transform into a recording, by its name.
CHANGES: dict[str, Change] = {
    "Resample": lambda r: r.resample(24000),
    "Speed": lambda r: r.perturb_speed(0.9),
    "Tempo": lambda r: r.perturb_tempo(1.1),
    "Volume": lambda r: r.perturb_volume(0.5),
}
NEEDED = {"Tempo": "torchaudio.sox_effects"}


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording.from_file(write_audio(tmp_path / "a.wav", chirp(100, 3000, 1.5) + hiss(24000, 1)))


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of Lhotse's own code
@pytest.mark.parametrize("change", [methodcaller("reverb_rir"), methodcaller("narrowband", "mulaw")])
def test_cuts_with_other_transforms_are_rejected_and_saving_their_audio_helps(
    tmp_path: Path, recording: Recording, change: Change
) -> None:
    cuts = CutSet.from_cuts([recording.to_cut().with_id("plain"), change(recording).to_cut().with_id("changed")])
    cuts.to_file(tmp_path / "cuts.jsonl")
    report = prepare_corpus(tmp_path / "cuts.jsonl", tmp_path / "a.corpus")
    assert (report.num_cuts, report.rejected) == (1, {"transform": 1})
    assert [reject["cut_id"] for reject in read_jsonl(report.path / "rejected.jsonl")] == ["changed"]
    cuts.save_audios(tmp_path / "saved", progress_bar=False).to_file(tmp_path / "saved.jsonl")
    report = prepare_corpus(tmp_path / "saved.jsonl", tmp_path / "b.corpus")
    assert (report.num_cuts, report.rejected) == (2, {})


_LOAD_ELSEWHERE = """
import random, sys
import numpy as np, torch
from nestdata import Corpus
random.seed(5), np.random.seed(6), torch.manual_seed(7), torch.set_num_threads(2)
corpus = Corpus.open(sys.argv[1])
torch.rand(3)
np.savez(sys.argv[2], **{corpus.line(i)["id"]: corpus.load(i)[1] for i in reversed(range(len(corpus)))})
"""


@pytest.mark.slow
def test_transforms_give_the_same_bits_at_every_load_and_in_every_process_or_are_refused(
    tmp_path: Path, recording: Recording
) -> None:
    changed = {}
    for name, change in CHANGES.items():
        if name not in NEEDED or lhotse_audio._has_module(NEEDED[name]):
            changed[name] = change(recording).to_cut().with_id(name)
    CutSet.from_cuts(changed.values()).to_file(tmp_path / "cuts.jsonl")
    prepare_corpus(tmp_path / "cuts.jsonl", tmp_path / "a.corpus", PrepareConfig(report_samples=0))
    paths = [str(tmp_path / name) for name in ("a.corpus", "elsewhere.npz")]
    subprocess.run(
        [sys.executable, "-c", _LOAD_ELSEWHERE, *paths],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "1"},
    )
    elsewhere = np.load(tmp_path / "elsewhere.npz")
    corpus = Corpus.open(tmp_path / "a.corpus")
    states = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"]
    for index in range(len(corpus)):
        cut_id, samples = corpus.load(index)
        assert np.abs(samples).max() > 0
        np.testing.assert_array_equal(samples, elsewhere[cut_id], err_msg=cut_id)
        np.testing.assert_array_equal(samples, corpus.load(index)[1], err_msg=cut_id)
        span = corpus.load(index, start=5001, num_samples=8000)[1]
        np.testing.assert_array_equal(span, corpus.load(index, start=5001, num_samples=8000)[1], err_msg=cut_id)
        if lhotse_audio.needs_whole_cut(corpus.line(index)["recording"]):
            np.testing.assert_array_equal(span, samples[5001:13001], err_msg=cut_id)
    assert torch.equal(states[0], torch.get_rng_state())
    np.testing.assert_array_equal(states[1], np.random.get_state(legacy=False)["state"]["key"])
    assert len(elsewhere) == len(changed) >= 3


def test_a_transform_whose_package_is_missing_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    monkeypatch.setattr(lhotse_audio, "_has_module", lambda _: False)
    row = {**recording.to_dict(), "transforms": [{"name": "Tempo", "kwargs": {"factor": 1.1}}]}
    manifest = write_jsonl(tmp_path / "many.jsonl", [{**row, "id": f"{number}"} for number in range(3)])
    message = r"transform 'Tempo' needs torchaudio\.sox_effects, which is not installed\. .*up to 2\.8"
    with pytest.raises(ManifestError, match=rf"many\.jsonl:1: the {message}"):
        prepare_corpus(manifest, tmp_path / "a.corpus")
    cut = {**recording.to_cut().to_dict(), "recording": row}
    with pytest.raises(ConfigError, match=message):
        load_samples(cut)
