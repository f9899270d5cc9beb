from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestdata import (
    AudioNoiseDataset,
    AugmentConfig,
    BadAudioConfig,
    BatchPlan,
    ConfigError,
    Corpus,
    MicrobatchKey,
    Mix,
    MixConfig,
    NoiseSampler,
    PackedBatch,
    PlanConfig,
    SpeakerNoiseMixer,
    microbatches,
    verify_corpus,
)
from nestdata.batch.memory import BatchMemory
from nestdata.batch.remote import RemoteStats
from tests.batches import digest, messy_dataset
from tests.conftest import MessyCorpora
from tests.synthesis import folder_corpus, hiss


def packed_batch(audio: torch.Tensor, segments: list[tuple[int, int]], noise: torch.Tensor) -> PackedBatch:
    lengths = torch.full((len(audio),), audio.shape[1])
    return PackedBatch(
        audio=audio,
        audio_len=lengths,
        noise=noise,
        noise_len=lengths,
        segments=torch.tensor(segments, dtype=torch.int64).reshape(-1, 2).T,
        sample_id=[str(row) for row in range(len(audio))],
        mixes=[Mix(mode="none")] * len(audio),
        bad_cuts=[],
        key=MicrobatchKey(0, 0, 0),
    )


@st.composite
def packed_parts(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
    """Audio of random type and content, segments without overlap, and the noise in them."""
    num_cuts, num_samples = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    audio: np.ndarray = random.integers(-32768, 32768, (num_cuts, num_samples)).astype(np.int16)
    if draw(st.booleans()):
        audio = (audio.astype(np.float32) / 7.0) * random.choice([0.0, -0.0, 1.0], audio.shape).astype(np.float32)
    borders = sorted(draw(st.sets(st.integers(0, audio.size), max_size=8)))
    segments = [(start, end - start) for start, end in zip(borders[::2], borders[1::2], strict=False)]
    noise = random.standard_normal(sum(number for _, number in segments)).astype(np.float32)
    return audio, segments, noise


@pytest.mark.numerics
@given(packed_parts())
def test_unpacking_computes_each_sample_as_one_product_and_one_sum(
    parts: tuple[np.ndarray, list[tuple[int, int]], np.ndarray],
) -> None:
    audio, segments, noise = parts
    batch = packed_batch(torch.from_numpy(audio), segments, torch.from_numpy(noise)).unpack()
    clean = audio if audio.dtype == np.float32 else (audio / 32768).astype(np.float32)
    expected_noise, expected_noisy, used = np.zeros_like(clean), clean.copy(), 0
    for start, number in segments:
        added = noise[used : used + number]
        expected_noise.reshape(-1)[start : start + number] = added
        expected_noisy.reshape(-1)[start : start + number] += added
        used += number
    assert batch.audio.numpy().tobytes() == clean.tobytes()
    assert batch.noise.numpy().tobytes() == expected_noise.tobytes()
    assert batch.noisy_audio.numpy().tobytes() == expected_noisy.tobytes()
    assert torch.equal(batch.noisy_audio_len, batch.audio_len)


@pytest.mark.numerics
def test_unpacked_batches_of_every_kind_of_audio_are_the_batches_of_the_dataset(messy_corpora: MessyCorpora) -> None:
    messy = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    kinds = set()
    for index in microbatches(messy.plan, num_steps=messy.plan.steps_per_epoch):
        packed = messy.load_packed(index)
        kinds.add(packed.audio.dtype)
        assert digest(packed.unpack()) == digest(messy[index])
    assert torch.float32 in kinds  # some cuts are resampled


def test_unpacking_keeps_all_fields_that_are_no_tensors() -> None:
    packed = packed_batch(torch.zeros(2, 5), [(1, 2)], torch.ones(2))
    packed = replace(packed, remote=RemoteStats(wait_s=1.5, retries=2), sampling_rate=8000)
    assert packed.unpack().metadata() == packed.metadata()


@pytest.fixture(scope="module")
def pcm16(tmp_path_factory: pytest.TempPathFactory) -> AudioNoiseDataset:
    """Twenty cuts of 16-bit audio, one of which is truncated, and noise."""
    directory = tmp_path_factory.mktemp("pcm16")
    speech = folder_corpus(directory / "speech", {f"{i:02d}.flac": hiss(12000 + 500 * i, i) for i in range(20)})
    whole = (directory / "speech" / "07.flac").read_bytes()
    (directory / "speech" / "07.flac").write_bytes(whole[: len(whole) // 2])
    noise = folder_corpus(directory / "noise", {"a.wav": hiss(64000, 99)})
    plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=6.0, microbatches_per_step=1))
    mixer = SpeakerNoiseMixer(MixConfig(num_segments=(1, 3)))
    bad_audio = BadAudioConfig(min_count=20)
    return AudioNoiseDataset(speech, plan, NoiseSampler(noise), mixer, bad_audio=bad_audio)


@pytest.mark.numerics
def test_batches_of_16_bit_audio_are_packed_as_integers_and_take_a_third_of_the_memory(
    pcm16: AudioNoiseDataset,
) -> None:
    packed_bytes = unpacked_bytes = 0
    seen_bad = False
    for index in microbatches(pcm16.plan, num_steps=2 * pcm16.plan.steps_per_epoch):
        packed, batch = pcm16.load_packed(index), pcm16[index]
        assert packed.audio.dtype == torch.int16
        assert digest(packed.unpack()) == digest(batch)
        seen_bad |= bool(batch.bad_cuts)
        packed_bytes += sum(tensor.nbytes for tensor in packed.tensors().values())
        unpacked_bytes += sum(tensor.nbytes for tensor in batch.tensors().values())
    assert seen_bad
    assert packed_bytes < unpacked_bytes / 3


def test_a_cut_that_is_not_16_bit_audio_makes_the_batch_float32(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(5)})
    samples, _ = soundfile.read(tmp_path / "speech" / "3.wav", dtype="float32")
    soundfile.write(tmp_path / "speech" / "3.wav", samples / 3, 16000, subtype="FLOAT")
    assert verify_corpus(corpus.path, accept_changed=True).num_accepted == 1
    corpus = Corpus.open(corpus.path)
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=5.0, microbatches_per_step=1))
    dataset = AudioNoiseDataset(corpus, plan, mixer=SpeakerNoiseMixer(MixConfig(prob=1.0)))
    slot = np.zeros(dataset._slot_bytes(packed=True), np.uint8)
    for memory in (BatchMemory(), BatchMemory(slot)):
        packed = dataset.load_packed((0, 0), memory)
        assert packed.audio.dtype == torch.float32
        assert digest(packed.unpack()) == digest(dataset[0, 0])
    # The 16-bit rows that were replaced take no memory of the slot.
    start = slot.ctypes.data
    assert all(start <= tensor.data_ptr() <= start + len(slot) for tensor in packed.tensors().values())


@pytest.mark.parametrize("chain", ["speech", "mixture"])
def test_transforms_of_the_noisy_audio_cannot_be_packed(tmp_path: Path, chain: str) -> None:
    corpus = folder_corpus(tmp_path / "speech", {"a.wav": hiss(16000, 1)})
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=5.0, microbatches_per_step=1))
    augment = AugmentConfig(**{chain: ["PolarityInversion"]})
    dataset = AudioNoiseDataset(corpus, plan, augment=augment)
    with pytest.raises(ConfigError, match=rf"augment\.{chain} changes the noisy audio"):
        dataset.load_packed((0, 0))
    with pytest.raises(ConfigError, match=rf"augment\.{chain} changes the noisy audio"):
        dataset.loader([(0, 0)], packed=True)


@pytest.mark.gpu
@pytest.mark.numerics
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_unpacks_the_same_bits(pcm16: AudioNoiseDataset) -> None:
    for index in microbatches(pcm16.plan, num_steps=pcm16.plan.steps_per_epoch):
        assert digest(pcm16.load_packed(index).to("cuda").unpack().to("cpu")) == digest(pcm16[index])
