import torch
from hypothesis import given
from hypothesis import strategies as st

from nestmodel.attention_context import Context, Style
from nestmodel.nn.attention import describe_frames, visible_keys


def is_visible(query: int, key: int, context: Context, style: Style) -> bool:
    """The definition of a context, for one pair of frames."""
    left, right = context
    if style == "chunked_limited" and right >= 0:
        chunk = right + 1
        chunks_back = query // chunk - key // chunk
        return 0 <= chunks_back and (left < 0 or chunks_back <= left // chunk)
    return (left < 0 or key >= query - left) and (right < 0 or key <= query + right)


@given(
    num_queries=st.integers(1, 20),
    more_keys=st.integers(0, 7),
    right=st.integers(-1, 5),
    left=st.integers(-1, 5),
    in_chunks=st.booleans(),
)
def test_visible_keys_equal_their_definition(
    num_queries: int, more_keys: int, right: int, left: int, in_chunks: bool
) -> None:
    style: Style = "chunked_limited" if in_chunks else "regular"
    context = (left * (right + 1) if in_chunks and left > 0 and right >= 0 else left, right)
    num_keys = num_queries + more_keys
    found = visible_keys(num_queries, num_keys, context, style)
    expected = [[is_visible(i, j, context, style) for j in range(num_keys)] for i in range(num_queries)]
    assert found.tolist() == expected
    assert found.diagonal().all()  # every frame attends to itself, so no valid frame is without keys


def test_visible_keys_by_hand() -> None:
    rows = visible_keys(5, 5, (2, 1), "chunked_limited").int().tolist()
    assert rows == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    rows = visible_keys(4, 4, (1, 0), "regular").int().tolist()
    assert rows == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_a_key_is_masked_if_it_is_padded_or_out_of_sight() -> None:
    frames = describe_frames(torch.zeros(2, 4, 8), torch.tensor([4, 2]), (1, 0), "regular")
    assert frames.is_masked_key.shape == (2, 1, 4, 4)
    visible = visible_keys(4, 4, (1, 0), "regular")
    assert torch.equal(frames.is_masked_key[0, 0], ~visible)
    assert torch.equal(frames.is_masked_key[1, 0], ~visible | torch.tensor([False, False, True, True]))


def test_without_a_context_all_queries_share_one_row() -> None:
    frames = describe_frames(torch.zeros(2, 4, 8), torch.tensor([4, 2]))
    assert frames.is_masked_key.tolist() == [[[[False] * 4]], [[[False, False, True, True]]]]
