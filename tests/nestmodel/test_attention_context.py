from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestmodel import ConfigError, FeatureConfig, NestConfig
from nestmodel.attention_context import context_name, draw_context, parse_context
from tests.training import tiny_config

CONTEXTS = ((6, 2), (-1, 0), (-1, -1))
LAST_SEED = 2**63 - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"att_context_size": ()}, r"att_context_size is \(\): expected one or more pairs"),
        ({"att_context_size": ((-2, 2),)}, r"att_context_size is \(\(-2, 2\),\): expected one or more pairs"),
        ({"att_context_style": "chunked_limited"}, r"att_context_size is .*: expected limited right contexts"),
        (
            {"att_context_size": ((6, 2), (7, 2)), "att_context_style": "chunked_limited"},
            r"a left context that is a multiple of the chunk of right \+ 1 = 3 frames, not 7",
        ),
        ({"att_context_size": ((8, 2), (8, 1)), "att_context_probs": (0.5, 0.4)}, "with the sum 1"),
        ({"att_context_size": ((8, 2), (8, 1)), "att_context_probs": (1.5, -0.5)}, "expected one probability"),
        ({"conv_context_size": (5, 2)}, r"conv_context_size is \(5, 2\): expected causal, null, or"),
    ],
)
def test_invalid_contexts_are_rejected_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^encoder\..*{message}"):
        tiny_config(**settings)


def test_the_drawn_context_follows_the_bits_of_the_seed() -> None:
    probs = (0.25, 0.5, 0.25)
    limits = [(0, 0), (2**61 - 1, 0), (2**61, 1), (3 * 2**61 - 1, 1), (3 * 2**61, 2), (LAST_SEED, 2)]
    for seed, expected in limits:
        assert draw_context(CONTEXTS, probs, seed) == CONTEXTS[expected]
    assert draw_context(CONTEXTS, None, 2**63 // 3) == CONTEXTS[0]
    assert draw_context(CONTEXTS, None, 2**63 // 3 + 2**11) == CONTEXTS[1]


@given(seed=st.integers(0, LAST_SEED), zero=st.integers(0, 2))
def test_a_context_of_probability_zero_is_never_drawn(seed: int, zero: int) -> None:
    probs = tuple(0.0 if place == zero else 0.5 for place in range(3))
    drawn = draw_context(CONTEXTS, probs, seed)
    assert drawn == draw_context(CONTEXTS, probs, seed)
    assert drawn in CONTEXTS
    assert drawn != CONTEXTS[zero]


def test_a_context_is_parsed_and_named() -> None:
    assert parse_context("70,13") == (70, 13)
    assert parse_context("-1,-1") == (-1, -1)
    for text in ("70", "70,13,1", "a,b", ""):
        with pytest.raises(ConfigError, match="give two numbers of encoder frames, such as 70,13"):
            parse_context(text)
    names = [context_name(context) for context in ((70, 13), (-1, 13), (-1, -1))]
    assert names == ["70_13", "all_13", "full"]


def live(config: NestConfig) -> NestConfig:
    return replace(config, features=FeatureConfig(normalize="NA"))


def test_the_look_ahead_in_seconds_contains_subsampling_and_window() -> None:
    contexts = {"att_context_size": ((70, 13), (70, 0), (-1, -1)), "att_context_style": "chunked_limited"}
    causal = live(tiny_config(**contexts, conv_context_size="causal", causal_downsampling=True))
    assert causal.look_ahead_s() == 13 * 0.08 + 0.0125
    assert causal.look_ahead_s((70, 0)) == 0.0125
    assert causal.look_ahead_s((-1, -1)) is None
    assert (
        causal.describe_contexts()
        == "70,13: 1.05 s, delay 1.06 s; 70,0: 0.0125 s, delay 0.016 s; -1,-1: the whole utterance"
    )
    centred = live(tiny_config(**contexts, conv_context_size="causal"))
    assert centred.look_ahead_s((70, 0)) == pytest.approx(0.07 + 0.0125)
    normalised = replace(causal, features=FeatureConfig())
    assert normalised.look_ahead_s((70, 0)) is None
