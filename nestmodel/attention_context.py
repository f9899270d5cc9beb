"""Attention contexts: which neighbours a frame attends to, and the draw of one of several for a microbatch.

A context is a pair (left, right) in encoder frames; `UNLIMITED` on a side sets no limit. `EncoderConfig` holds one or
more. This module checks them and draws one; `nestmodel.nn.attention.visible_keys` makes a mask from it. This module
does not import torch.

Source: `att_context_size`, `att_context_style` and `att_context_probs` of the ConformerEncoder of NeMo 3.0.0.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from nestdata.config_checks import require
from nestmodel.errors import ConfigError

UNLIMITED = -1
"""A side of a context without a limit."""

Context = tuple[int, int]
"""Numbers of encoder frames to the left and to the right that a frame attends to."""

Style = Literal["regular", "chunked_limited"]
"""`regular` counts from each frame; `chunked_limited` divides an utterance into chunks of right + 1 frames."""


def check_contexts(contexts: Sequence[Context], probs: Sequence[float] | None, style: Style) -> None:
    """Checks the attention contexts of an encoder.

    Raises:
        ConfigError: No context is given. A context is not two numbers of frames. With `chunked_limited`, the right side
            is unlimited, or the left side is not a multiple of the chunk. The probabilities do not fit the contexts.
    """
    field = "encoder.att_context_size"
    are_pairs = isinstance(contexts, tuple) and len(contexts) > 0
    are_pairs = are_pairs and all(is_pair_of_frames(context, minimum=UNLIMITED) for context in contexts)
    expected = f"one or more pairs (left, right) of numbers of encoder frames, {UNLIMITED} for no limit"
    require(are_pairs, field, contexts, expected)
    for left, right in contexts if style == "chunked_limited" else ():
        # NeMo also accepts an unlimited context if there are several.
        if (left, right) == (UNLIMITED, UNLIMITED) and len(contexts) > 1:
            continue
        expected = "limited right contexts with att_context_style chunked_limited, whose chunks are right + 1 frames"
        require(right != UNLIMITED, field, contexts, expected)
        expected = f"a left context that is a multiple of the chunk of right + 1 = {right + 1} frames, not {left}"
        require(left == UNLIMITED or left % (right + 1) == 0, field, contexts, expected)
    if probs is not None:
        fits = len(probs) == len(contexts) and min(probs) >= 0.0 and math.isclose(sum(probs), 1.0, abs_tol=1e-6)
        expected = f"one probability for each of the {len(contexts)} values of att_context_size, with the sum 1"
        require(fits, "encoder.att_context_probs", probs, expected)


def parse_context(text: str) -> Context:
    """Parses a context such as `70,13`.

    Raises:
        ConfigError: The text is not two numbers.
    """
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise ConfigError(f"context is {text!r}: give two numbers of encoder frames, such as 70,13.") from None
    return left, right


def format_context(context: Context) -> str:
    """Returns the text that `parse_context` reads."""
    return f"{context[0]},{context[1]}"


def context_name(context: Context) -> str:
    """Returns a context as a part of a name, such as `70_13`, `all_13` or `full`."""
    if context == (UNLIMITED, UNLIMITED):
        return "full"
    return "_".join("all" if side == UNLIMITED else str(side) for side in context)


def look_ahead(context: Context, style: Style, *, num_layers: int, conv_right: int) -> int | None:
    """Returns the largest number of later encoder frames that a frame of the last block depends on; None if unlimited.

    Args:
        context: Numbers of encoder frames to the left and to the right.
        style: How the context is counted.
        num_layers: Number of blocks.
        conv_right: Number of frames to the right that each block's convolution reads.
    """
    _, right = context
    if right == UNLIMITED:
        return None
    if style == "regular":
        return num_layers * (right + conv_right)
    # The convolution of a block reads frames of the next chunks, whose attention reads all of their frames.
    chunk = right + 1
    return right + (num_layers - 1) * math.ceil(conv_right / chunk) * chunk + conv_right


def is_streamable(context: Context, style: Style) -> bool:
    """Returns whether each frame needs only a limited number of earlier frames, and later frames of its chunk only."""
    left, right = context
    return left != UNLIMITED and (right == 0 or (right > 0 and style == "chunked_limited"))


def is_pair_of_frames(value: object, *, minimum: int = 0) -> bool:
    """Returns whether a value is a tuple of two integers of `minimum` or more."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(type(side) is int and side >= minimum for side in value)  # type: ignore[attr-defined]


def draw_context(contexts: Sequence[Context], probs: Sequence[float] | None, seed: int) -> Context:
    """Returns the context of a microbatch, a function of its seed.

    Args:
        contexts: Contexts to choose from, at least one.
        probs: Their probabilities; None makes them equal.
        seed: 63 random bits, from `NestNetwork.seed_for`.
    """
    shares = [1.0 / len(contexts)] * len(contexts) if probs is None else probs
    uniform = (seed >> 10) * 2.0**-53  # in [0, 1)
    return contexts[bisect_right(list(accumulate(shares))[:-1], uniform)]
