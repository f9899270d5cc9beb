import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import jaxtyping
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import derive_key
from nestmodel import ConfigError, EncoderConfig, NestConfig
from nestmodel.attention_context import draw_context
from tests.training import tiny_config

CONTEXTS = ((6, 2), (-1, 0), (-1, -1))
LAST_SEED = 2**63 - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"att_context_size": ()}, r"att_context_size is \(\): expected one or more pairs"),
        ({"att_context_size": ((-2, 2),)}, r"att_context_size is \(\(-2, 2\),\): expected one or more pairs"),
        ({"att_context_size": ((8, 2), (8, -2))}, "expected one or more pairs"),
        ({"att_context_style": "chunked_limited"}, r"att_context_size is .*: expected limited right contexts"),
        ({"att_context_size": ((6, 2), (6, -1)), "att_context_style": "chunked_limited"}, "expected limited right"),
        (
            {"att_context_size": ((6, 2), (7, 2)), "att_context_style": "chunked_limited"},
            r"a left context that is a multiple of the chunk of right \+ 1 = 3 frames, not 7",
        ),
        ({"att_context_probs": ()}, r"att_context_probs is \(\): expected one probability for each of the 1"),
        ({"att_context_probs": (0.5, 0.5)}, "for each of the 1 values"),
        ({"att_context_size": ((8, 2), (8, 1)), "att_context_probs": (0.5, 0.4)}, "with the sum 1"),
        ({"att_context_size": ((8, 2), (8, 1)), "att_context_probs": (1.5, -0.5)}, "expected one probability"),
        ({"att_context_size": ((8, 2), (8, 1)), "att_context_probs": (0.5, float("nan"))}, "expected one probability"),
        ({"conv_context_size": (5, 2)}, r"conv_context_size is \(5, 2\): expected causal, null, or"),
        ({"conv_context_size": (9, -1)}, r"left \+ right = conv_kernel_size - 1 \(8\)"),
    ],
)
def test_invalid_contexts_are_rejected_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^encoder\..*{message}"):
        tiny_config(**settings)


@pytest.fixture
def _without_annotation_checks() -> Iterator[None]:
    """As in a run, where values that a caller passes from Python may have any type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_without_annotation_checks")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"att_context_size": (8, 2)}, r"att_context_size is \(8, 2\): expected one or more pairs"),
        ({"att_context_size": ((8, 2, 1),)}, "expected one or more pairs"),
        ({"att_context_size": [[8, 2]]}, "expected one or more pairs"),
        ({"att_context_size": ((8, 2.0),)}, "expected one or more pairs"),
        ({"att_context_size": ((True, 2),)}, "expected one or more pairs"),
        ({"conv_context_size": (8,)}, "expected causal, null, or"),
        ({"conv_context_size": "causa"}, "expected causal, null, or"),
    ],
)
def test_values_of_the_wrong_type_in_python_are_rejected_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^encoder\..*{message}"):
        tiny_config(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("att_context_size", [8, 2]),
        ("att_context_size", None),
        ("att_context_size", [[8, "2"]]),
        ("att_context_probs", [0.5, "a"]),
        ("att_context_style", "chunked"),
        ("conv_context_size", "centred"),
        ("conv_context_size", [5]),
        ("causal_downsampling", None),
    ],
)
def test_values_of_the_wrong_type_in_a_file_are_rejected_by_name(name: str, value: object) -> None:
    values = asdict(tiny_config())
    values["encoder"][name] = value
    with pytest.raises(ConfigError, match=rf"encoder\.{name} is .*: expected "):
        NestConfig.from_dict(values)


def test_the_kinds_of_values_of_a_convolution_context_are_named() -> None:
    values = asdict(tiny_config())
    values["encoder"]["conv_context_size"] = [1, 2, 3]
    expected = r"conv_context_size is \[1, 2, 3\]: expected 'causal' or tuple\[int, int\] or null\."
    with pytest.raises(ConfigError, match=expected):
        NestConfig.from_dict(values)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"att_context_size": ((8, 2),), "conv_context_size": (5, 3)},
        {"att_context_size": CONTEXTS, "att_context_style": "chunked_limited", "att_context_probs": (0.5, 0.25, 0.25)},
        {"conv_context_size": "causal", "causal_downsampling": True},
    ],
)
def test_contexts_are_read_back_from_plain_values(settings: dict[str, object]) -> None:
    config = tiny_config(**settings)
    assert NestConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(("size", "expected"), [(None, (4, 4)), ("causal", (8, 0)), ((5, 3), (5, 3)), ((0, 8), (0, 8))])
def test_the_convolution_reads_kernel_size_minus_one_other_frames(size: object, expected: tuple[int, int]) -> None:
    assert tiny_config(conv_context_size=size).encoder.conv_context == expected


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


@pytest.mark.parametrize("probs", [(0.7, 0.2, 0.1), None])
def test_draws_of_many_microbatches_have_the_probabilities(probs: tuple[float, ...] | None) -> None:
    number = 20_000
    keys = (derive_key(0, "attention context", step, 0) >> 1 for step in range(number))
    counts = Counter(draw_context(CONTEXTS, probs, key) for key in keys)
    for context, prob in zip(CONTEXTS, probs or (1 / 3,) * 3, strict=True):
        deviation = (prob * (1 - prob) / number) ** 0.5
        assert abs(counts[context] / number - prob) < 5 * deviation  # the keys, and so the counts, never change


def test_defaults_are_unlimited_and_symmetric() -> None:
    config = EncoderConfig(d_model=16, num_heads=2, num_layers=1)
    assert config.att_context_size == ((-1, -1),)
    assert (config.att_context_probs, config.att_context_style) == (None, "regular")
    assert (config.conv_context, config.causal_downsampling) == ((4, 4), False)
