"""Finds figures in pages that are not in the result files that these pages cite.

A block is a paragraph, an item of a list, or a row of a table. A table whose paragraph before ends with a colon has the
links of this paragraph as well.

- Every number of a block that links to `benchmarks/results/` must be in one of these results, also those of settings:
  a claim states its conditions.
- In other blocks of the README, a number with a unit of measurement or a decimal point is an error.

Numbers in code, in the text of other links, and in versions (`Python 3.11`, `H100`) do not count. A number may be
rounded to any decimal, an integer of three or more digits also to tens, hundreds and so on while two digits remain;
that of `ms` or `GB` may be 1,000 times larger or smaller than in the result. Signs are ignored. A small integer is
easily found by chance, so this notices figures with decimals that changed, rather than every wrong claim.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

RESULTS = "benchmarks/results/"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?"
_NUMBER = rf"(?<![\w.,/-])[-+±]?{_DIGITS}(?: million)?(?!\w|[.,]\d|-\w)"
_UNIT = (
    r"\s?(?:%|(?:percent|percentage|s|ms|µs|seconds?|minutes?|hours?|days?|h|kB|MB|GB|TB|nats|times|[GT]?FLOPs?"
    r"|audio-s|audio-seconds|audio-s/s|MB/s|GB/s)(?![\w/]))"
)
_PRODUCTS = "Python|PyTorch|Lhotse|NeMo|Lightning"  # their versions are no figures
_AND = r"(?:,? (?:to|and|or|instead of|against) |, )"
_LINK = re.compile(rf"\]\((?:\.\./)*{RESULTS}([^)#/\s]+\.md)")
_SCALED = re.compile(r"\s?(?:ms|µs|kB|MB|GB)(?![\w/])")


class Figure(NamedTuple):
    """A number of a page."""

    text: str
    scales: tuple[Decimal, ...]
    """Factors with which it may stand in a result."""


class Block(NamedTuple):
    """A paragraph, an item of a list, or a row of a table."""

    text: str
    results: list[str]
    """Names of the result files that it cites."""


def blocks(page: str) -> Iterator[Block]:
    """Yields the blocks of a page, without code."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    before = ""
    for paragraph in re.split(r"\n\s*\n", page):
        if paragraph.startswith("    ") or not paragraph.strip():
            continue
        for text in re.split(r"\n(?=\s*(?:[-*]|\d+\.) |\|)", paragraph):
            cited = text + before if text.startswith("|") else text
            yield Block(text, _LINK.findall(cited))
        before = paragraph if paragraph.rstrip().endswith(":") else ""


def figures(text: str, *, measured_only: bool = False) -> list[Figure]:
    """Returns the numbers of a block.

    Args:
        text: Markdown.
        measured_only: Whether integers without a unit of measurement are left out.
    """
    text = re.sub(r"`[^`]*`", "`code`", re.sub(r"\s+", " ", re.sub(r"^\s*\d+\. ", "", text)))
    text = re.sub(rf"\[([^]]*)\]\((?:\.\./)*{RESULTS}[^)]*\)", r"\1", text)
    text = re.sub(r"\[[^]]*\]\([^)]*\)", "link", text)
    text = re.sub(rf"\b({_PRODUCTS}) \d+\.\d+(?:\.\d+)*(?!{_UNIT})\b", r"\1", text)
    found = []
    for match in re.finditer(_NUMBER, text):
        rest = text[match.end() :]
        unit = re.match(rf"(?:{_AND}{_NUMBER})*({_UNIT})", rest)
        if measured_only and unit is None and "." not in match[0]:
            continue
        scaled = unit is not None and _SCALED.match(unit[1]) is not None
        scales = (Decimal(1), Decimal(1000), Decimal("0.001")) if scaled else (Decimal(1),)
        found.append(Figure(match[0].lstrip("-+±"), scales))
    return found


def numbers(result: str) -> set[Decimal]:
    """Returns the numbers of a result, without its line on what it measures."""
    result = re.sub(r"^Measures `.*$", "", result, flags=re.MULTILINE)
    return {Decimal(each.replace(",", "")) for each in re.findall(rf"(?<![\w.]){_DIGITS}(?!\w)", result)}


def is_in(figure: Figure, values: set[Decimal]) -> bool:
    """Returns whether a figure is one of these values, rounded."""
    value = Decimal(figure.text.replace(",", "").replace(" million", "e6"))
    exponent = int(value.as_tuple().exponent)
    if value >= 100 and "." not in figure.text:  # 2,500 is 25e2
        exponent = min(int(value.normalize().as_tuple().exponent), value.adjusted() - 1)
    half_unit = Decimal(5).scaleb(exponent - 1)
    return any(abs(each * scale - value) <= half_unit for each in values for scale in figure.scales)


def unsupported(block: Block, folder: Path) -> list[str]:
    """Returns the numbers of a block that are in none of the results that it cites."""
    values = {value for name in block.results for value in numbers((folder / name).read_text(encoding="utf-8"))}
    return [figure.text for figure in figures(block.text) if not is_in(figure, values)]
