import random
from typing import Any

import pytest
import yaml

from nestmodel import ConfigError, NestConfig, config_from_nemo
from nestmodel.config_files import check_size, read_yaml

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12))


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "a: &a [*a]", "[" * 5000 + "]" * 5000])
def test_a_small_text_cannot_describe_a_large_value(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"alias \*a\d*: write out what it stands for|nested too deeply"):
        read_yaml(text)


@pytest.mark.parametrize("text", ["a: 2024-02-30", "a: " + "9" * 5000, "a: 0x_", "a: !!map [x]", "a: !!map foo"])
def test_a_value_that_does_not_exist_is_an_error_of_yaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


def test_yaml_without_aliases_is_read_as_by_the_library() -> None:
    draw = random.Random(0)

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth else 4)
        if kind < 4:
            return (draw.random(), draw.randrange(9), "text: " * draw.randrange(3), None)[kind]
        parts = [value(depth - 1) for _ in range(3)]
        return parts if kind == 4 else {f"k{i}": part for i, part in enumerate(parts)}

    for _ in range(100):
        text = yaml.safe_dump(value(4))
        assert read_yaml(text) == yaml.safe_load(text)


def shared(depth: int) -> list[Any]:
    """Returns a value of 2 ** depth parts that takes the memory of `depth`."""
    found: list[Any] = [1, 2]
    for _ in range(depth):
        found = [found, found]
    return found


def test_a_value_with_shared_parts_is_counted_with_all_of_them() -> None:
    check_size(shared(10), "value")
    endless: list[Any] = []
    endless.append(endless)
    wide: list[Any] = []
    wide += [wide] * 50_000
    for value in (shared(60), {"a": shared(60)}, endless, wide):
        with pytest.raises(ConfigError, match=r"value has more than 100,000 values"):
            check_size(value, "value")


def test_configurations_of_any_origin_are_bounded_and_shown_in_short() -> None:
    for read in (NestConfig.from_dict, config_from_nemo):
        with pytest.raises(ConfigError, match="more than 100,000 values"):
            read({"encoder": {"d_model": shared(60)}})
        with pytest.raises(ConfigError) as caught:
            read({"encoder": ["x" * 100_000]})
        assert len(str(caught.value)) < 1000
