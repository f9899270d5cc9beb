import base64
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import soundfile
import torch

from nestdata import AudioNoiseBatch, MicrobatchKey, Mix
from tests.batches import messy_dataset
from tests.conftest import MessyCorpora

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\udcff"


class Parsed(HTMLParser):
    """The elements and the cells of a table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sounds: dict[str, tuple[np.ndarray, int]] = {}
        self.rows: list[list[str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "audio":
            values = dict(attrs)
            kind, _, content = str(values["src"]).partition(",")
            assert kind == "data:audio/wav;base64"
            samples, rate = soundfile.read(BytesIO(base64.b64decode(content)), dtype="float64")
            self.sounds[str(values["aria-label"])] = samples, rate

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def batch(messy_corpora: MessyCorpora) -> AudioNoiseBatch:
    """A batch with cuts that received noise, and ones that received speech."""
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    batches = (dataset[step, microbatch] for step in range(20) for microbatch in range(4))
    return next(batch for batch in batches if {"noise", "speech"} <= {mix.mode for mix in batch.mixes})


def test_a_batch_is_shown_in_one_short_line(batch: AudioNoiseBatch) -> None:
    num_mixed = sum(mix.mode != "none" for mix in batch.mixes)
    assert repr(batch) == (
        f"AudioNoiseBatch(step {batch.key.step}, microbatch {batch.key.microbatch}: {len(batch.mixes)} cuts padded to "
        f"{batch.audio.shape[1] / 16000:.2f} s at 16000 Hz, {num_mixed} with interference)"
    )
    unknown = replace(batch, sampling_rate=None)
    assert f"padded to {batch.audio.shape[1]} samples," in repr(unknown)
    assert Parsed(unknown._repr_html_()).sounds == {}


def test_the_table_of_a_batch_plays_the_samples_of_its_noisy_and_clean_audio(batch: AudioNoiseBatch) -> None:
    parsed = Parsed(batch._repr_html_())
    assert parsed.tags == {"table", "thead", "tbody", "tr", "th", "td", "audio"}
    assert [row[0] for row in parsed.rows[2:]] == batch.sample_id[:20]
    modes = [mix.mode for mix in batch.mixes]
    played = {modes.index("noise"), modes.index("speech")}
    assert set(parsed.sounds) == {f"{kind}, {batch.sample_id[i]}" for kind in ("clean", "noisy") for i in played}
    for i in played:
        first_s, _, last_s = parsed.rows[2 + i][-1].split()[:3]
        start, number = round(float(first_s) * 16000), len(parsed.sounds[f"clean, {batch.sample_id[i]}"][0])
        assert start <= batch.mixes[i].segments[0][0] + 80 <= start + number  # the span is shown in hundredths
        assert abs(float(last_s) * 16000 - start - number) <= 160
        expected = {"clean": batch.audio[i].double().numpy(), "noisy": batch.noisy_audio[i].double().numpy()}
        for kind, samples in expected.items():
            sound, rate = parsed.sounds[f"{kind}, {batch.sample_id[i]}"]
            assert rate == 16000
            near = range(max(0, start - 80), min(start + 81, len(samples) - number + 1))
            peak = max(1.0, *(np.abs(expected[name]).max() for name in expected))
            errors = [np.abs(samples[at : at + number] / peak - sound).max() for at in near]
            assert peak > 1 or min(errors) <= 1 / 32768


def loud_batch(level: float, num_cuts: int = 1, seconds: float = 1.0, rate: int = 16000) -> AudioNoiseBatch:
    """Returns a batch of equal cuts with ids that are HTML, half of whose samples received interference."""
    num_samples = round(seconds * rate)
    audio = level * torch.sin(torch.arange(num_samples) * 0.1).repeat(num_cuts, 1)
    modes = ["noise", "speech"]
    template = {"snr_db": 3.0, "sources": (HOSTILE,), "segments": ((num_samples // 2, num_samples // 2),)}
    lengths = torch.full((num_cuts,), num_samples)
    return AudioNoiseBatch(
        audio=audio,
        audio_len=lengths,
        noise=audio / 2,
        noise_len=lengths,
        noisy_audio=1.5 * audio,
        noisy_audio_len=lengths,
        sample_id=[f"{i}{HOSTILE}" for i in range(num_cuts)],
        mixes=[Mix(mode=modes[i % 2], **template) for i in range(num_cuts)],  # type: ignore[arg-type]
        bad_cuts=[],
        key=MicrobatchKey(0, 3, 1),
        sampling_rate=rate,
    )


def test_sound_above_full_scale_is_scaled_down_and_not_clipped() -> None:
    batch = loud_batch(1.0)
    parsed = Parsed(batch._repr_html_())
    clean, noisy = (sound for sound, _ in parsed.sounds.values())
    peak = batch.noisy_audio.abs().max().item()
    assert parsed.rows[2][-1] == "0.00 to 1.00 s, at 0.67 of its level"
    assert np.abs(noisy - batch.noisy_audio[0].numpy() / peak).max() <= 1 / 32768
    assert np.abs(clean - batch.audio[0].numpy() / peak).max() <= 1 / 32768
    silent = replace(batch, audio=torch.full_like(batch.audio, torch.nan), noisy_audio=batch.audio * torch.inf)
    assert len(Parsed(silent._repr_html_()).sounds) == 2


@pytest.mark.parametrize("rate", [8000, 16000, 48000])
def test_a_large_batch_with_hostile_ids_is_bounded_in_size_and_escaped(rate: int) -> None:
    html = loud_batch(0.1, num_cuts=50, seconds=20.0, rate=rate)._repr_html_()
    assert len(html.encode()) < 260_000
    parsed = Parsed(html)
    assert parsed.tags == {"table", "thead", "tbody", "tr", "th", "td", "audio"}
    assert parsed.rows[2][0] == f"0{HOSTILE}".replace("\udcff", "\\udcff")
    assert parsed.rows[-1][0] == "and 30 more"
    assert len(parsed.rows) == 2 + 20 + 1
    assert all(len(sound) <= 4 * rate for sound, _ in parsed.sounds.values())
    assert sum(2 * len(sound) for sound, _ in parsed.sounds.values()) <= 160_000
    # Without interference, one cut is played.
    plain = loud_batch(0.1, num_cuts=2, rate=rate)
    plain = replace(plain, mixes=[Mix(mode="none")] * 2)
    assert len(Parsed(plain._repr_html_()).sounds) == 2


def test_corpora_plans_and_datasets_are_shown_in_one_line_and_as_a_table(messy_corpora: MessyCorpora) -> None:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    corpora, plan, noise = dataset.corpus, dataset.plan, dataset.noise.corpus
    assert noise is not None
    size = f"{len(corpora)} cuts, {corpora.hours:.2f} h, 16000 Hz"
    assert repr(corpora) == f"Corpora(1 corpus, {size})"
    steps = f"{plan.steps_per_epoch} steps an epoch"
    assert repr(plan) == (
        f"BatchPlan(steps_per_epoch={plan.steps_per_epoch}, microbatches_per_step=4, max_batch_seconds=8, seed=3)"
    )
    assert repr(dataset) == f"AudioNoiseDataset({size}; {len(noise)} cuts of noise; {steps})"
    for shown in (corpora.corpora[0], corpora, plan, dataset):
        parsed = Parsed(shown._repr_html_())
        assert parsed.tags == {"table", "thead", "tbody", "tr", "th", "td"}
        assert parsed.rows[0][0].split()[0] == type(shown).__name__
        assert len(parsed.rows) > 2
    assert ["fingerprint", plan.fingerprint] in Parsed(plan._repr_html_()).rows
    assert ["path", str(messy_corpora.speech)] in Parsed(corpora.corpora[0]._repr_html_()).rows
