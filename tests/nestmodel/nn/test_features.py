from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestmodel.config import FeatureConfig
from nestmodel.nn.features import LogMelFeatures
from tests.kernels import run_alone


def chirps(*lengths: int) -> Tensor:
    """Sweeps of different rates, one row per length, padded with a loud constant to the longest."""
    longest = max(lengths)
    time = torch.arange(longest) / 16000
    rows = [0.3 * torch.sin(2 * torch.pi * (200 + 900 * (row + 1) * time) * time) for row in range(len(lengths))]
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0.9
    return torch.stack(rows)


def front_end(**settings: Any) -> LogMelFeatures:
    return LogMelFeatures(replace(FeatureConfig(), **settings)).eval()


@pytest.mark.parametrize("length", [0, 100, 160, 300])
def test_features_of_at_most_one_frame_are_zero(length: int) -> None:
    feats, feat_lens = front_end()(chirps(3200), torch.tensor([length]))
    assert feat_lens.tolist() == [length // 160]
    assert not feats.any()


@settings(deadline=None, max_examples=15, derandomize=True)
@given(length=st.integers(320, 6000), padding=st.integers(0, 6000))
def test_features_of_an_utterance_do_not_depend_on_its_padding(length: int, padding: int) -> None:
    alone, alone_lens = front_end()(chirps(length), torch.tensor([length]))
    batch, batch_lens = front_end()(chirps(length, length + padding), torch.tensor([length, length + padding]))
    num_valid = int(alone_lens)
    assert batch_lens[0] == alone_lens[0]
    assert torch.allclose(alone[0, :, :num_valid], batch[0, :, :num_valid], atol=1e-4)
    assert not batch[0, :, num_valid:].any()


def test_dither_does_not_modify_the_callers_audio() -> None:
    audio = chirps(8000, 5000)
    before = audio.clone()
    front_end(dither=0.1).train()(audio, torch.tensor([8000, 5000]))
    assert torch.equal(audio, before)


def test_dither_acts_in_training_only_and_differs_between_rows() -> None:
    audio, lens = chirps(8000).repeat(2, 1), torch.tensor([8000, 8000])
    quiet, _ = front_end(dither=0.1)(audio, lens)
    assert torch.equal(quiet, front_end(dither=0.0)(audio, lens)[0])
    dithered, _ = front_end(dither=0.1).train()(audio, lens)
    assert not torch.allclose(dithered[0], dithered[1], atol=1e-2)


def test_features_are_float32_and_the_same_under_autocast() -> None:
    audio, lens = chirps(8000), torch.tensor([8000])
    expected, _ = front_end()(audio, lens)
    with torch.autocast("cpu", torch.bfloat16):
        feats, _ = front_end()(audio, lens)
    assert feats.dtype == torch.float32
    assert torch.equal(feats, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling_rate": 8000},
        {"n_fft": 1024},
        {"window_length": 320},
        {"hop_length": 80},
        {"num_mels": 40},
        {"pad_to": 1},
        {"preemphasis": 0.0},
        {"normalize": "NA"},
    ],
)
def test_every_setting_changes_the_features(settings: dict[str, Any]) -> None:
    audio, lens = chirps(8000), torch.tensor([8000])
    default, _ = front_end()(audio, lens)
    feats, _ = front_end(**settings)(audio, lens)
    assert feats.shape != default.shape or not torch.allclose(feats, default, atol=1e-2)


COMPILED = """
import pickle
import sys
from copy import deepcopy
import torch
from torch._dynamo.utils import counters
from nestmodel.config import FeatureConfig
from nestmodel.nn.backend import TORCH, Backend
from nestmodel.nn.features import LogMelFeatures

torch.set_num_threads(1)
torch.manual_seed(0)
plain = LogMelFeatures(FeatureConfig(dither=0.1)).double()
compiled = deepcopy(plain)
num_shapes = int(sys.argv[1]) if sys.argv[1] != "None" else None
compiled.use_backend(Backend(kernels=True, compiled=True, num_shapes=num_shapes))

# Noise has energy in all bins: no logarithm and no deviation magnifies rounding. So the two differ by less than 1e3
# roundings, which are 1e-13 in double precision and 1e-4 in single precision.
audio, lens = 0.3 * torch.randn(4, 8001).double(), torch.tensor([8001, 4999, 160, 0])
for is_training in (True, False):
    seen = []
    for features in (plain.train(is_training), compiled.train(is_training)):
        torch.manual_seed(1)  # of the dither
        seen.append(features(audio, lens))
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=1e-12)
    assert seen[1][1].tolist() == [50, 31, 1, 0] and seen[1][0].shape == (4, 80, 64)
    assert seen[1][0].is_contiguous() and not seen[1][0][2:].any()
in_batch = seen[1][0]

alone, _ = pickle.loads(pickle.dumps(compiled))(audio[1:2, :4999], lens[1:2])
torch.testing.assert_close(alone[0, :, :31], in_batch[1, :, :31], rtol=0, atol=1e-12)
assert counters["stats"]["unique_graphs"] == 5, counters["stats"]
assert not counters["graph_break"]

features = LogMelFeatures(FeatureConfig()).eval()
expected, _ = features(audio, lens)
features.use_backend(Backend(kernels=True, compiled=True, num_shapes=1))
with torch.autocast("cpu", torch.bfloat16):
    found, _ = features(audio, lens)
torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
assert counters["stats"]["unique_graphs"] == 7
features.use_backend(TORCH)
assert torch.equal(features(audio, lens)[0], expected)
assert counters["stats"]["unique_graphs"] == 7
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_shapes", ["2", "None"])
def test_compiled_features_equal_the_plain_ones_except_for_rounding(num_shapes: str, tmp_path: Path) -> None:
    # In a separate process, because the compiler cannot trace the annotation checks that tests enable; with a cache of
    # its own, because torch reuses code that was generated for another instruction set.
    run_alone(COMPILED, num_shapes, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
