import pytest
import torch

from nestmodel.attention_context import Context
from nestmodel.nn.attention import MASKED_SCORE, describe_frames
from nestmodel.nn.gpu.fused_attention import describe_gpu_frames, round_up


@pytest.mark.parametrize("context", [None, (1, 0), (2, 3)])
@pytest.mark.parametrize("num_frames", [1, 7, 8])
def test_positions_and_masks_are_those_of_the_reference_with_more_columns(
    num_frames: int, context: Context | None
) -> None:
    x, lens = torch.zeros(2, num_frames, 8), torch.tensor([num_frames, num_frames // 2])
    ours, expected = describe_gpu_frames(x, lens, context), describe_frames(x, lens, context)
    assert ours.key_scores.shape[3] == 8
    assert torch.equal(ours.key_scores[..., :num_frames], expected.is_masked_key * MASKED_SCORE)
    assert torch.equal(ours.is_valid.squeeze(2), (~expected.is_padding).float())
    assert len(ours.positions) == 16
    assert torch.equal(ours.positions[: 2 * num_frames - 1], expected.positions)


def test_sizes_are_rounded_up_to_multiples_of_eight() -> None:
    assert [round_up(size) for size in (1, 7, 8, 9)] == [8, 8, 8, 16]
