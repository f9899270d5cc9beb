from dataclasses import replace
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestmodel.config import MaskConfig
from nestmodel.nn.masking import BlockMask, scored_token_mask


def draw(lens: list[int], num_frames: int, seed: int = 0, **settings: float) -> list[list[bool]]:
    masks = BlockMask(replace(MaskConfig(), **settings), dim=3)
    drawn = masks.draw(torch.tensor(lens), num_frames, torch.Generator().manual_seed(seed))
    rows: list[list[bool]] = drawn.tolist()
    return rows


def masked_frames(row: list[bool]) -> list[int]:
    return [frame for frame, is_masked in enumerate(row) if is_masked]


@pytest.mark.parametrize(
    ("length", "block_size", "num_masked"),
    [
        (60, 40, 59),  # blocks start at frames 0 to 19, so the last one ends before frame 59
        (51, 40, 50),
        (6, 4, 5),
        (50, 40, 8),  # short: the first eight frames
        (8, 40, 8),
        (5, 40, 5),
        (0, 40, 0),
    ],
)
def test_probability_one_starts_a_block_at_every_frame_except_the_last_block_size(
    length: int, block_size: int, num_masked: int
) -> None:
    (row,) = draw([length], 64, prob=1.0, block_size=block_size)
    assert masked_frames(row) == list(range(num_masked))
    is_short = block_size >= 0.8 * length
    assert (draw([length], 64, prob=0.0, block_size=block_size) == [row]) == is_short


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    lens=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    padding=st.integers(0, 50),
    prob=st.floats(0.0, 0.3),
    block_size=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_masks_consist_of_whole_blocks_inside_utterances(
    lens: list[int], padding: int, prob: float, block_size: int, seed: int
) -> None:
    for length, row in zip(lens, draw(lens, max(lens) + padding, seed, prob=prob, block_size=block_size), strict=True):
        assert not any(row[length:])
        if length >= block_size / 0.8:
            assert length == 0 or not row[length - 1]
            runs = [len(list(run)) for is_masked, run in groupby(row) if is_masked]
            assert all(run >= block_size for run in runs)


def test_share_of_masked_frames_has_its_expected_value() -> None:
    (row,) = draw([200_000], 200_000)
    share = sum(row) / len(row)
    assert share == pytest.approx(1 - 0.99**40, abs=0.01)


@pytest.mark.parametrize(
    ("num_masked", "threshold", "expected"), [(6, 0.8, False), (7, 0.8, True), (4, 0.5, False), (4, 0.4, True)]
)
def test_a_token_is_scored_if_its_share_of_masked_frames_exceeds_the_threshold(
    num_masked: int, threshold: float, expected: bool
) -> None:
    is_masked = torch.tensor([[True] * num_masked + [False] * (8 - num_masked) + [True] * 8])
    assert scored_token_mask(is_masked, 8, threshold).tolist() == [[expected, True]]


def test_blocks_over_encoder_frames_are_an_eighth_as_long() -> None:
    masks = BlockMask(MaskConfig(position="post_conv", prob=1.0), dim=3, subsampling_factor=8)
    drawn = masks.draw(torch.tensor([7, 6]), 8, torch.Generator().manual_seed(0)).tolist()
    assert masked_frames(drawn[0]) == [0, 1, 2, 3, 4, 5]  # blocks of 5 start at 0 and 1
    assert masked_frames(drawn[1]) == [0]  # short: a block of 5 would cover 80 % or more
