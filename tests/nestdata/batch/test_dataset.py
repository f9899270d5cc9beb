import itertools
import multiprocessing
import os
import pickle
import random
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
import torch
from torch.utils.data import DataLoader

import nestguard
from nestdata import (
    AudioError,
    AudioNoiseBatch,
    AudioNoiseDataset,
    BadAudioConfig,
    BadCut,
    BatchPlan,
    ConfigError,
    Corpus,
    MicrobatchKey,
    MixConfig,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    ShortAudio,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)
from nestdata.audio.decode import load_samples
from nestdata.batch.bad_audio import BadAudioCounter
from nestdata.batch.loader import StartWorker
from tests.batches import STEPS_WITH_ALL_SHAPES, digest, full_dataset, messy_dataset
from tests.conftest import MessyCorpora
from tests.synthesis import folder_corpus, hiss, read_audio, tone, write_audio, write_jsonl

# Three workers are started on any machine. PyTorch warns on machines with fewer cores; newer Pythons warn of forks.
many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded.*fork")


def dataset_of(
    corpus: Corpus,
    noise: Corpus | None = None,
    mix: MixConfig | None = None,
    *,
    plan: PlanConfig | None = None,
    short_audio: ShortAudio = "repeat",
) -> AudioNoiseDataset:
    config = plan or PlanConfig(max_batch_seconds=8.0, microbatches_per_step=1)
    return AudioNoiseDataset(
        corpus,
        BatchPlan.of(corpus, config),
        NoiseSampler(noise),
        SpeakerNoiseMixer(mix) if mix else None,
        short_audio=short_audio,
    )


def all_batches(dataset: AudioNoiseDataset, num_epochs: int = 1) -> list[AudioNoiseBatch]:
    batch_indices = microbatches(dataset.plan, num_steps=num_epochs * dataset.plan.steps_per_epoch)
    return [dataset[batch_index] for batch_index in batch_indices]


@pytest.fixture(scope="module")
def messy(messy_corpora: MessyCorpora) -> AudioNoiseDataset:
    return messy_dataset(messy_corpora.speech, messy_corpora.noise)


@pytest.fixture(scope="module")
def messy_batches(messy: AudioNoiseDataset) -> list[AudioNoiseBatch]:
    """Batches of two epochs, loaded in this process with more torch threads than loader workers have."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        batches = all_batches(messy, num_epochs=2)
    finally:
        torch.set_num_threads(num_threads)
    mixes = [mix for batch in batches for mix in batch.mixes]
    assert {mix.mode for mix in mixes} == {"noise", "speech", "none"}
    assert {len(mix.segments) for mix in mixes} == {0, 1, 2, 3}
    assert {len(mix.sources) for mix in mixes if mix.mode == "speech"} == {1, 2}
    assert any(mix.bad_noise for mix in mixes)
    return batches


@many_workers
@pytest.mark.multiprocess
def test_batches_with_every_feature_enabled_are_the_same_byte_for_byte_with_any_number_of_workers(
    messy_corpora: MessyCorpora,
) -> None:
    full = full_dataset(messy_corpora.speech, messy_corpora.windows, messy_corpora.banked)
    batch_indices = microbatches(full.plan, num_steps=STEPS_WITH_ALL_SHAPES)
    batches = [full[batch_index] for batch_index in reversed(batch_indices)][::-1]
    expected = [digest(batch) for batch in batches]
    for num_workers in (0, 2):
        assert [digest(batch) for batch in full.loader(batch_indices, num_workers=num_workers)] == expected
    assert {mix.mode for batch in batches for mix in batch.mixes} == {"noise", "speech", "none"}
    assert {bad.reason for batch in batches for bad in batch.bad_cuts} == {"changed"}
    assert any((batch.noisy_audio != batch.audio + batch.noise).any() for batch in batches)
    assert len({batch.audio.shape for batch in batches}) == 3


@many_workers
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_are_the_same_byte_for_byte_from_any_step_on_with_any_number_of_workers(
    messy: AudioNoiseDataset, messy_batches: list[AudioNoiseBatch], num_workers: int
) -> None:
    num_steps, per_step = 2 * messy.plan.steps_per_epoch, messy.plan.config.microbatches_per_step
    expected = [digest(batch) for batch in messy_batches]
    for step in (0, 1, num_steps - 1):  # one step within each epoch
        batch_indices = microbatches(messy.plan, start_step=step, num_steps=num_steps - step)
        loaded = list(messy.loader(batch_indices, num_workers=num_workers))
        assert [batch.key for batch in loaded] == batch_indices
        assert [digest(batch) for batch in loaded] == expected[step * per_step :]


def test_every_cut_gets_different_noise_in_every_epoch(tmp_path: Path) -> None:
    speech = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(8)})
    noise = folder_corpus(tmp_path / "noise", {"a.wav": hiss(64000, 99)})
    dataset = dataset_of(speech, noise, MixConfig(prob=1.0, noise_ratio=1.0, mix_rate=(1.0, 1.0)))
    # All crops come from one recording; two crops that are equal except for their level would have one random key.
    noises = [signal / signal.norm() for batch in all_batches(dataset, num_epochs=3) for signal in batch.noise]
    assert len(noises) == 24
    assert all(float((first * second).sum()) < 0.9 for first, second in itertools.combinations(noises, 2))


def test_batch_fields_hold_what_their_docstrings_say(
    messy: AudioNoiseDataset, messy_batches: list[AudioNoiseBatch]
) -> None:
    for batch in messy_batches:
        num_cuts, num_samples = batch.audio.shape
        assert num_samples == messy.plan.microbatch(*batch.key).padded_samples
        assert len(batch.sample_id) == len(batch.mixes) == num_cuts
        assert {name: tensor.dtype for name, tensor in batch.tensors().items()} == {
            "audio": torch.float32,
            "audio_len": torch.int64,
            "noise": torch.float32,
            "noise_len": torch.int64,
            "noisy_audio": torch.float32,
            "noisy_audio_len": torch.int64,
        }
        assert torch.equal(batch.noisy_audio, batch.audio + batch.noise)
        assert torch.equal(batch.noisy_audio_len, batch.audio_len)
        is_padding = torch.arange(num_samples) >= batch.audio_len[:, None]
        for tensor in (batch.audio, batch.noise, batch.noisy_audio):
            assert torch.isfinite(tensor).all()
            assert not tensor[is_padding].any()
        for position, mix in enumerate(batch.mixes):
            assert int(batch.noise_len[position]) == (0 if mix.mode == "none" else int(batch.audio_len[position]))
            assert bool(batch.noise[position].any()) == (mix.mode != "none")
            if mix.mode == "none":
                assert torch.equal(batch.noisy_audio[position], batch.audio[position])


def test_clean_audio_of_a_batch_is_the_audio_of_its_cuts(
    messy: AudioNoiseDataset, messy_batches: list[AudioNoiseBatch]
) -> None:
    (corpus,) = messy.corpus.corpora
    cuts = {corpus[index].id: corpus[index] for index in range(len(corpus))}
    for batch in messy_batches:
        for position, cut_id in enumerate(batch.sample_id):
            samples = load_samples(cuts[cut_id])
            assert int(batch.audio_len[position]) == max(len(samples), messy.plan.min_samples)
            np.testing.assert_array_equal(batch.audio[position, : len(samples)].numpy(), samples)


def test_heartbeat_names_every_cut_that_is_loaded_and_none_at_the_end(
    messy: AudioNoiseDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Mock()
    mixer = SpeakerNoiseMixer(MixConfig(prob=1.0, noise_ratio=1.0))
    dataset = AudioNoiseDataset(messy.corpus, messy.plan, messy.noise, mixer)
    monkeypatch.setattr(nestguard, "current", lambda: heartbeat)
    batch = dataset[0, 0]
    noted = [call.args[0] for call in heartbeat.method_calls]
    num_cuts = len(batch.sample_id)
    assert noted[:num_cuts] == batch.sample_id
    noise = [source for mix in batch.mixes for source in mix.sources]
    bad_noise = [bad.cut_id for mix in batch.mixes for bad in mix.bad_noise]
    silent = {"silent"} if "white noise" in noise else set()  # the fallback of a silent noise, which was read, too
    assert set(noted[num_cuts:-1]) == {*noise, *bad_noise} - {"white noise"} | silent
    assert noise
    assert noted[-1] == ()


def receive_sigterm_as_a_worker() -> None:
    StartWorker(1, None)(0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_worker_ends_after_sigterm_even_if_its_rank_handles_sigalrm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestdata.batch.loader._SECONDS_TO_FINISH", 1)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        worker = multiprocessing.get_context("fork").Process(target=receive_sigterm_as_a_worker)
        worker.start()
    finally:
        signal.signal(signal.SIGALRM, before)
    worker.join(30)
    worker.kill()
    worker.join()
    assert worker.exitcode == -signal.SIGALRM


def test_short_audio_is_repeated_up_to_the_minimum_or_padded_with_zeros(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": hiss(7000, 1)})
    samples = torch.from_numpy(read_audio(tmp_path / "speech" / "a.wav"))
    repeated, padded = dataset_of(corpus)[0, 0], dataset_of(corpus, short_audio="pad")[0, 0]
    assert repeated.audio_len.tolist() == padded.audio_len.tolist() == [16000]
    assert torch.equal(repeated.audio[0], torch.cat([samples, samples, samples[:2000]]))
    assert torch.equal(padded.audio[0], torch.cat([samples, torch.zeros(9000)]))


def test_without_a_mixer_the_noisy_audio_is_the_clean_audio(messy: AudioNoiseDataset) -> None:
    dataset = AudioNoiseDataset(messy.corpus, messy.plan, messy.noise)
    for batch in all_batches(dataset):
        assert torch.equal(batch.noisy_audio, batch.audio)
        assert not batch.noise.any()
        assert not batch.noise_len.any()
        assert {mix.mode for mix in batch.mixes} == {"none"}


def test_without_a_noise_corpus_only_speech_is_added(messy: AudioNoiseDataset) -> None:
    dataset = AudioNoiseDataset(messy.corpus, messy.plan, mixer=SpeakerNoiseMixer(MixConfig(prob=1.0)))
    modes = {mix.mode for batch in all_batches(dataset) for mix in batch.mixes}
    assert modes == {"speech", "none"}


def test_noise_at_another_rate_than_the_speech_is_rejected(tmp_path: Path) -> None:
    speech = folder_corpus(tmp_path / "speech", {"a.wav": hiss(16000, 1)})
    noise = folder_corpus(tmp_path / "noise", {"b.wav": hiss(16000, 2)}, PrepareConfig(sampling_rate=8000))
    with pytest.raises(ConfigError, match=r"noise\.corpus is at 8000 Hz .* --sampling-rate 16000"):
        dataset_of(speech, noise)


def tones(directory: Path, number: int = 40) -> Corpus:
    """Cuts of about two seconds, each at a different level."""
    levels = np.linspace(0.05, 0.5, number)
    audio = {f"{i:02d}.flac": tone(300, 2.0 + i / 500, level=float(levels[i])) for i in range(number)}
    return folder_corpus(directory / "speech", audio)


def break_files(directory: Path) -> dict[str, str]:
    """Damages four files of `tones` in ways that are found when they are read, and returns the reasons by cut."""
    (directory / "speech" / "03.flac").unlink()
    whole = (directory / "speech" / "11.flac").read_bytes()
    (directory / "speech" / "11.flac").write_bytes(whole[: len(whole) // 2])
    (directory / "speech" / "19.flac").write_bytes(b"")
    soundfile.write(directory / "speech" / "27.flac", tone(300, 0.5), 16000)
    return {"03": "missing", "11": "changed", "19": "changed", "27": "changed"}


@many_workers
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_workers", [0, 2])
def test_cut_that_becomes_unreadable_is_replaced_by_one_of_its_bucket_and_nothing_else_changes(
    tmp_path: Path, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = tones(tmp_path)
    dataset = dataset_of(corpus, plan=PlanConfig(max_batch_seconds=13.0, microbatches_per_step=2))
    before = all_batches(dataset, num_epochs=2)
    reasons = break_files(tmp_path)
    batch_indices = microbatches(dataset.plan, num_steps=2 * dataset.plan.steps_per_epoch)
    after = list(dataset.loader(batch_indices, num_workers=num_workers))
    assert [digest(batch) for batch in after] == [digest(batch) for batch in all_batches(dataset, num_epochs=2)]
    replaced = []
    for whole, batch in zip(before, after, strict=True):
        assert batch.audio.shape == whole.audio.shape
        bad = {cut.cut_id: cut.reason for cut in batch.bad_cuts}
        replaced += [*bad]
        assert bad == {name: reasons[name] for name in bad}
        for i, cut_id in enumerate(whole.sample_id):
            if cut_id in reasons:
                assert batch.sample_id[i] not in reasons
            else:
                assert batch.sample_id[i] == cut_id
                assert torch.equal(batch.audio[i], whole.audio[i])
    assert sorted(set(replaced)) == sorted(reasons)
    logged = [record.message for record in caplog.records if "replaced" in record.message]
    assert len(logged) == len(reasons)  # once each, although each was read in two epochs
    assert any("03.flac" in message and "missing" in message for message in logged)


def test_more_unusable_cuts_than_allowed_end_the_run_with_a_list(tmp_path: Path) -> None:
    corpus = tones(tmp_path)
    break_files(tmp_path)
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=13.0, microbatches_per_step=2))
    dataset = AudioNoiseDataset(corpus, plan, bad_audio=BadAudioConfig(max_share=0.05, min_count=2))
    batch_indices = microbatches(plan, num_steps=plan.steps_per_epoch)
    with pytest.raises(
        AudioError,
        match=r"3 of \d+ reads of speech failed .*more than the allowed 5 %: .*\d\d \((missing|changed)\)",
    ):
        list(dataset.loader(batch_indices))
    patient = AudioNoiseDataset(corpus, plan, bad_audio=BadAudioConfig(max_share=0.2, min_count=2))
    assert len(list(patient.loader(batch_indices))) == len(batch_indices)


def test_bucket_without_any_readable_cut_is_an_error_that_names_its_cuts(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": hiss(16000, 1), "b.wav": hiss(16000, 2)})
    for name in "ab":
        (tmp_path / "speech" / f"{name}.wav").unlink()
    tried = r"step 0, microbatch 0: none of 21 cuts .*used \([ab](?:, [ab]){20}\)"
    with pytest.raises(AudioError, match=rf"{tried}; the last: cut '[ab]': cannot read .*\.wav"):
        _ = dataset_of(corpus)[0, 0]


def test_noise_that_becomes_unreadable_is_replaced_counted_and_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = tones(tmp_path)
    noise = folder_corpus(tmp_path / "noise", {f"{name}.wav": hiss(48000, ord(name)) for name in "abcd"})
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=13.0, microbatches_per_step=2))
    mixer = SpeakerNoiseMixer(MixConfig(prob=1.0, noise_ratio=1.0))
    batch_indices = microbatches(plan, num_steps=plan.steps_per_epoch)
    (tmp_path / "noise" / "c.wav").unlink()
    batches = list(AudioNoiseDataset(corpus, plan, NoiseSampler(noise), mixer).loader(batch_indices))
    mixes = [mix for batch in batches for mix in batch.mixes]
    assert {mix.sources for mix in mixes} == {("a",), ("b",), ("d",)}
    failed = [bad for mix in mixes for bad in mix.bad_noise]
    assert {(bad.cut_id, bad.reason) for bad in failed} == {("c", "missing")}
    assert sum(mix.num_reads for mix in mixes) == len(mixes) + len(failed)
    assert [record.message for record in caplog.records if "noise replaced, missing" in record.message] != []
    assert len([record for record in caplog.records if "noise replaced" in record.message]) == 1
    strict = BadAudioConfig(max_noise_share=0.1, min_count=1)
    with pytest.raises(AudioError, match=r"reads of noise failed \(\d missing\).*c \(missing\)"):
        list(AudioNoiseDataset(corpus, plan, NoiseSampler(noise), mixer, bad_audio=strict).loader(batch_indices))


def test_batch_indices_of_one_rank_are_its_share_of_each_step_in_order() -> None:
    plan = BatchPlan(np.full(40, 16000), 16000, PlanConfig(max_batch_seconds=4.0, microbatches_per_step=4))
    assert microbatches(plan, num_steps=1) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert microbatches(plan, num_steps=1)[1] == MicrobatchKey(step=0, microbatch=1)
    assert microbatches(plan, rank=1, world_size=2, start_step=5, num_steps=2) == [(5, 2), (5, 3), (6, 2), (6, 3)]
    assert microbatches(plan, rank=3, world_size=4, num_steps=0) == []
    with pytest.raises(ConfigError, match="3 ranks cannot share"):
        microbatches(plan, world_size=3, num_steps=1)


def test_speech_and_noise_may_be_paths(messy_corpora: MessyCorpora) -> None:
    speech, noise = messy_corpora.speech, Corpus.open(messy_corpora.noise)
    plan, mixer = BatchPlan.of(speech, PlanConfig(max_batch_seconds=8.0)), SpeakerNoiseMixer()
    expected = digest(AudioNoiseDataset(Corpus.open(speech), plan, NoiseSampler(noise), mixer)[3, 1])
    assert digest(AudioNoiseDataset(str(speech), plan, noise.path, mixer)[3, 1]) == expected
    assert digest(AudioNoiseDataset([speech], plan, noise, mixer)[3, 1]) == expected
    assert digest(AudioNoiseDataset(speech, plan, NoiseSampler(str(noise.path)), mixer)[3, 1]) == expected


def test_a_step_alone_is_its_first_microbatch(messy_corpora: MessyCorpora) -> None:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    for index in (0, np.int64(7)):
        assert digest(dataset[index]) == digest(dataset[int(index), 0])
    for wrong in (-1, (0, 100)):
        with pytest.raises(IndexError, match="steps start at 0"):
            dataset[wrong]


def labelled_corpus(directory: Path, draw: random.Random, labels: dict[bytes, dict[str, str]]) -> Corpus:
    """Prepares random audio, adds the labels of each cut by the bytes of its first samples, and removes some files."""
    rows = []
    for number in range(draw.randrange(8, 30)):
        seconds, name = draw.uniform(0.3, 3.0), f"{number}.wav"
        samples = hiss(round(seconds * 16000), draw.randrange(1 << 30))
        write_audio(directory / name, samples, subtype="FLOAT")
        own = {
            "text": f"{directory.name} says {number}",
            "speaker": f"s{draw.randrange(4)}",
            "lang": directory.name,
            "take": f"t{number}",
        }
        rows.append({"audio_filepath": name, "duration": len(samples) / 16000, **own})
        labels[samples[:1000].tobytes()] = own
    prepare_corpus([write_jsonl(directory / "rows.json", rows)], directory.with_suffix(".corpus"))
    for row in draw.sample(rows, len(rows) // 8):
        (directory / str(row["audio_filepath"])).unlink()
    return Corpus.open(directory.with_suffix(".corpus"))


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("seed", range(2))
def test_the_labels_of_a_row_are_those_of_the_audio_in_it(tmp_path: Path, seed: int) -> None:
    draw, labels = random.Random(seed), dict[bytes, dict[str, str]]()
    corpora = [labelled_corpus(tmp_path / name, draw, labels) for name in ("en", "sw")]
    config = PlanConfig(
        max_batch_seconds=9.0, microbatches_per_step=2, weights=(1.0, draw.uniform(0.1, 5.0)), seed=seed
    )
    plan = BatchPlan.of(corpora, config)
    dataset = AudioNoiseDataset(corpora, plan, mixer=SpeakerNoiseMixer(), bad_audio=BadAudioConfig(max_share=1.0))
    indices = microbatches(plan, num_steps=2 * plan.steps_per_epoch)
    in_this_process, num_replaced = list(dataset.loader(indices)), 0
    for num_workers in (0, 2):
        # With two slots of shared memory, some batches come by pickle.
        for expected, batch in zip(
            in_this_process, dataset.loader(indices, num_workers=num_workers, num_slots=2), strict=True
        ):
            assert batch.indices == expected.indices
            num_replaced += len(batch.bad_cuts)
            for form in (batch, pickle.loads(pickle.dumps(batch)).to("cpu")):
                for row, cut in enumerate(dataset.cuts(form)):
                    own = labels[form.audio[row, :1000].numpy().tobytes()]
                    (told,) = cut.supervisions
                    assert [told.text, told.speaker, told.language, cut.custom["take"]] == list(own.values())
    assert num_replaced > 0
    assert len({index for batch in in_this_process for index in batch.indices}) < sum(map(len, corpora))


def test_a_batch_of_another_dataset_has_no_cuts_here(messy_corpora: MessyCorpora) -> None:
    plans = {path: BatchPlan.of(path) for path in (messy_corpora.speech, messy_corpora.windows)}
    speech, windows = (AudioNoiseDataset(path, plan) for path, plan in plans.items())
    for batch, other in ((speech[0], windows), (windows[0], speech)):
        with pytest.raises(
            ConfigError, match=r"is not from AudioNoiseDataset\(.*ask the dataset that it was loaded from"
        ):
            other.cuts(batch)


def test_a_loader_of_torch_takes_the_batches_of_given_steps_and_no_others(messy_corpora: MessyCorpora) -> None:
    plan = BatchPlan.of(messy_corpora.speech, PlanConfig(max_batch_seconds=8.0, microbatches_per_step=2))
    dataset = AudioNoiseDataset(messy_corpora.speech, plan)
    indices = microbatches(plan, num_steps=3)
    loader: DataLoader[object] = DataLoader(dataset, sampler=indices, batch_size=None)
    for batch, index in zip(loader, indices, strict=True):
        assert torch.equal(batch.audio, dataset[index].audio)
    for use in (len, list, lambda given: list(DataLoader(given)), lambda given: DataLoader(given, shuffle=True)):
        with pytest.raises(TypeError, match=r"use dataset\.loader\(microbatches.*, not DataLoader\(dataset\)"):
            use(dataset)
    assert dataset


GONE = BadCut("a", "missing", "cut 'a': cannot read a.wav")


def test_share_is_limited_only_above_the_minimum_count() -> None:
    counter = BadAudioCounter("speech", 0.1, 3)
    for _ in range(3):
        counter.add(1, [GONE])
    with pytest.raises(AudioError, match=r"4 of 4 reads of speech failed \(4 missing\), more than the allowed 10 %"):
        counter.add(1, [GONE])


def test_share_within_its_limit_never_ends_a_run() -> None:
    counter = BadAudioCounter("speech", 0.1, 1)
    counter.add(100, [])
    for _ in range(50):
        counter.add(10, [GONE])
    with pytest.raises(AudioError, match=r"61 of 600 reads"):
        counter.add(0, [GONE] * 11)
