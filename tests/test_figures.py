"""Checks that the figures of the README and the docs are in the results that they cite, and that these are current."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measured import (
    REPOSITORY,
    Measured,
    accept,
    digest,
    is_stale,
    main,
    measured_line,
    read_measured,
    rename,
)
from benchmarks.measured import RESULTS as RESULT_FILES
from tests.figures import Block, blocks, figures, is_in, numbers, unsupported

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# Figures of the README that no benchmark measures.
WITHOUT_A_RESULT = {"about 6 GB": "the size of an installation"}
# What the text before the first table of a result must state, so that others can repeat the measurement.
CONDITIONS = {
    "the command": r"`[^`]*(?:benchmarks/[\w/]+\.py|python -m benchmarks[.\w]+)",
    "the machine": (
        r"\b(?:\d+|one|two)(?: shared)?(?: CPU)? cores?\b|\b(?:on|of) (?:a CPU|one (?:CPU|H100|GPU))\b|\bcounted\b"
    ),
    "how often": (
        r"\b(?:\d+|one|two|three)\b[^.\n]{0,20}\b(?:rounds?|pairs|starts?|seeds?|runs?|calls|processes)\b"
        r"|\bonce\b|\bcounted\b"
    ),
}


def missing_conditions(result: str) -> list[str]:
    result = re.sub(r"^Measures `.*$", "", result, flags=re.MULTILINE)
    head = re.split(r"^\||^## ", result, flags=re.MULTILINE)[0]
    return [missing for missing, words in CONDITIONS.items() if not re.search(words, head, re.IGNORECASE)]


def claims(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.results]


CITED = sorted({name for page in PAGES for block in claims(page) for name in block.results})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_of_a_claim_is_in_a_result_that_it_cites(page: Path) -> None:
    missing = [(block.text, unsupported(block, RESULT_FILES)) for block in claims(page)]
    assert [(text, found) for text, found in missing if found] == []


def test_every_measured_number_of_the_readme_is_beside_a_link_to_its_result() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for known in WITHOUT_A_RESULT:
        assert known in text
        text = text.replace(known, "")
    found = [(block.text, figures(block.text, measured_only=True)) for block in blocks(text) if not block.results]
    assert [(text, numbers) for text, numbers in found if numbers] == []


@pytest.mark.parametrize("name", CITED)
def test_a_cited_result_is_of_the_present_code(name: str) -> None:
    measured = read_measured((RESULT_FILES / name).read_text(encoding="utf-8"))
    assert measured is not None, f"{name} does not say what it measures. Measure again, with `measured_line`."
    assert not is_stale(measured), (
        f"The code that {name} measures has changed: {', '.join(measured.paths)}. Measure again; or if the figures "
        f"stand, run `python benchmarks/measured.py --accept 'WHY THEY STAND' benchmarks/results/{name}`."
    )


@pytest.mark.parametrize("name", CITED)
def test_a_cited_result_states_its_conditions(name: str) -> None:
    assert missing_conditions((RESULT_FILES / name).read_text(encoding="utf-8")) == []


def test_conditions_are_stated_before_the_first_table_and_not_by_the_line_on_code() -> None:
    made, table = "# Speed\n\nMade by `benchmarks/bench.py`, 5 rounds, two cores.\n\n", "| s |\n|---|\n| 1 |\n"
    assert missing_conditions(made + table) == []
    assert missing_conditions(made.replace(", two cores", "") + table) == ["the machine"]
    assert missing_conditions(made.replace("5 rounds, ", "") + table) == ["how often"]
    code = "Measures `benchmarks/bench.py`: code 0123456789ab at commit 0123456.\n\n"
    assert missing_conditions(f"# Speed\n\n{code}{table}\n{made}") == [*CONDITIONS]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("88 % of 35 languages in 4.8 nats", ["88", "35", "4.8"]),
        ("with `--steps 6000` and Python 3.11, NeMo 3.0.0 on an H100", []),
        ("Lhotse 1.33: 3.86 %, and Lhotse 2.5 % later", ["3.86", "2.5"]),
        ("-4.5 (-5.4 to -3.6), 1,000,000 cuts and 36 million", ["4.5", "5.4", "3.6", "1,000,000", "36 million"]),
        ("within 1e-9 and 2.5e-7", ["1e-9", "2.5e-7"]),
        ("[12 ms](benchmarks/results/a.md), [page 5](docs/b.md) and [arXiv:2408.13106](https://arxiv.org)", ["12"]),
        ("1. The first of 2 items", ["2"]),
    ],
)
def test_the_numbers_of_a_block(text: str, expected: list[str]) -> None:
    assert [figure.text for figure in figures(text)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8 ranks, 182 buckets, 1.31 % and 23 times", ["1.31", "23"]),
        ("8 x 10 s, 6 or 7 minutes, 2,500 to 2,700 seconds", ["10", "6", "7", "2,500", "2,700"]),
        ("2 stages, 5 minuets, 4 spans", []),
        ("Lhotse 1.33 and Median 1.5", ["1.5"]),
    ],
)
def test_measured_numbers_have_a_unit_or_a_decimal_point(text: str, expected: list[str]) -> None:
    assert [figure.text for figure in figures(text, measured_only=True)] == expected


@pytest.mark.parametrize(
    ("claim", "result"),
    [
        ("38.7 %", "38.71"),
        ("38.7 %", "38.65"),
        ("23 times", "22.9"),
        ("2,500 audio-s/s", "2545"),
        ("60,000 audio-s/s", "6.009e+04"),
        ("12 ms", "0.012"),
        ("2.1 GB", "2082"),
        ("36 million cuts", "36,000,000"),
        ("2800 cuts", "2,800"),
    ],
)
def test_a_rounded_figure_is_in_its_result(claim: str, result: str) -> None:
    (figure,) = figures(claim)
    assert is_in(figure, numbers(f"| speed | {result} |"))


@pytest.mark.parametrize(
    ("claim", "result"),
    [
        ("38.7 %", "38.64"),
        ("38.70 %", "38.71"),
        ("23 times", "22.4"),
        ("2,500 audio-s/s", "2551"),
        ("60,000 audio-s/s", "61,000"),
        ("40 %", "41"),
        ("12 s", "0.012"),
        ("12 ms", "120"),
        ("3 s", "v3 of 1.3"),
        ("7 s", "Measures `a.py`: code 0123456789ab at commit 7; 7."),
    ],
)
def test_another_figure_is_not_in_the_result(claim: str, result: str) -> None:
    (figure,) = figures(claim)
    assert not is_in(figure, numbers(result))


def test_each_row_of_a_table_is_a_claim_with_the_links_of_the_paragraph_before(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("1.5 s of 2 s")
    (tmp_path / "b.md").write_text("70 %")
    page = (
        "[Measured](../benchmarks/results/a.md#x):\n\n| s | [%](benchmarks/results/b.md) |\n|---|---|\n| 1.5 | 70 |\n"
        "| 2 s | 1.6 s |\n\nNo link: 5 s.\n\n- [2 s](benchmarks/results/a.md)\n- 3 s\n\n    9 s\n\n```\n8 s\n```\n"
    )
    found = [(block.results, unsupported(block, tmp_path)) for block in blocks(page)]
    assert found == [
        (["a.md"], []),
        (["b.md", "a.md"], []),
        (["a.md"], []),
        (["a.md"], ["70"]),
        (["a.md"], ["1.6"]),
        ([], ["5"]),
        (["a.md"], []),
        ([], ["3"]),
    ]


CODE = '''"""Doubles."""


def double(number: int) -> str:
    """Returns a text."""
    return f"{2 * number:>{number}}"  # twice
'''


def write_code(root: Path, code: str = CODE, *, preset: str = "steps: 4\n") -> None:
    (root / "package").mkdir(parents=True, exist_ok=True)
    (root / "package" / "double.py").write_text(code)
    (root / "preset.yaml").write_text(preset)


def test_the_digest_is_equal_on_every_python(tmp_path: Path) -> None:
    write_code(tmp_path)
    assert (
        digest(["package", "preset.yaml"], tmp_path) == digest(["preset.yaml", "package"], tmp_path) == "d56a2f558a64"
    )


def test_docstrings_comments_and_formatting_do_not_make_a_result_stale(tmp_path: Path) -> None:
    write_code(tmp_path)
    measured = Measured(["package"], [digest(["package"], tmp_path)])
    write_code(tmp_path, "def double(\n    number: int,\n) -> str: return f'{2 * number:>{number}}'")
    assert not is_stale(measured, tmp_path)


@pytest.mark.parametrize(("code", "preset"), [(CODE.replace("2 *", "3 *"), "steps: 4\n"), (CODE, "steps: 5\n")])
def test_changed_code_and_changed_presets_make_a_result_stale(tmp_path: Path, code: str, preset: str) -> None:
    write_code(tmp_path)
    measured = Measured(["package/double.py", "preset.yaml"], [digest(["package", "preset.yaml"], tmp_path)])
    assert not is_stale(measured, tmp_path)
    write_code(tmp_path, code, preset=preset)
    assert is_stale(measured, tmp_path)


def test_a_new_file_in_a_measured_folder_makes_a_result_stale(tmp_path: Path) -> None:
    write_code(tmp_path)
    measured = Measured(["package"], [digest(["package"], tmp_path)])
    (tmp_path / "package" / "more.py").write_text("MORE = 1\n")
    assert is_stale(measured, tmp_path)


def test_a_measured_file_that_was_removed_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"package/gone\.py: there is no such file or folder under "):
        digest(["package/gone.py"], tmp_path)


@pytest.mark.parametrize(("status", "changed"), [("", ""), (" M tests/figures.py\n", " with changes")])
def test_the_line_of_a_result_says_what_it_measures(status: str, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "abc1234\n", "status": status}

    def asked(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=answers[command[1]])

    monkeypatch.setattr("benchmarks.measured.subprocess.run", asked)
    paths = ["benchmarks/measured.py", "tests/figures.py"]
    line = measured_line(*paths)
    assert line.endswith(f" at commit abc1234{changed}.")
    assert read_measured(f"# Title\n\n{line}\n\nMore.\n") == Measured(paths, [digest(paths)])
    assert read_measured("Measures everything.") is None


@pytest.mark.parametrize("result", sorted(RESULT_FILES.glob("*.md")), ids=lambda path: path.name)
def test_a_result_says_once_what_it_measures_and_holds_no_unresolved_merge(result: Path) -> None:
    text = result.read_text(encoding="utf-8")
    assert len(re.findall(r"^Measures `", text, re.MULTILINE)) <= 1
    assert not re.search(r"^(?:<{7} |>{7} |={7}$)", text, re.MULTILINE)


def test_an_accepted_change_is_added_with_its_reason(tmp_path: Path) -> None:
    result, path = tmp_path / "result.md", "tests/figures.py"
    result.write_text(f"# Speed\n\nMeasures `{path}`: code 0123456789ab at commit 0123456.\n\nFast.\n")
    accept(result, "only a message changed.")
    text = result.read_text()
    assert text == (
        f"# Speed\n\nMeasures `{path}`: code 0123456789ab at commit 0123456; "
        f"code {digest([path])}: only a message changed.\n\nFast.\n"
    )
    measured = read_measured(text)
    assert measured == Measured([path], ["0123456789ab", digest([path])])
    assert not is_stale(measured)
    accept(result, "only a name changed.")
    assert result.read_text() == text.replace(": only a message", " after accepted changes, the last one: only a name")
    assert read_measured(result.read_text()) == measured


def test_a_file_that_has_moved_is_named_anew_as_a_path_and_as_a_module() -> None:
    text = (
        "Made by `benchmarks/plan.py --cuts 4` and `python -m benchmarks.plan`.\n\n"
        "Measures `benchmarks/plan.py`, `benchmarks/plan.python`: code 0123456789ab at commit 0123456.\n"
    )
    assert rename(text, "benchmarks/plan.py", "benchmarks/batches/padding.py") == (
        "Made by `benchmarks/batches/padding.py --cuts 4` and `python -m benchmarks.batches.padding`.\n\n"
        "Measures `benchmarks/batches/padding.py`, `benchmarks/plan.python`: code 0123456789ab at commit 0123456.\n"
    )


def test_stale_results_are_listed_until_they_are_accepted_with_a_reason(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        script = REPOSITORY / "benchmarks" / "measured.py"
        done = subprocess.run([sys.executable, script, *arguments, result], capture_output=True, text=True)
        return done.returncode, done.stdout

    result = tmp_path / "result.md"
    result.write_text("Measures `tests/figures.py`: code 0123456789ab at commit 0123456.\n")
    stale = f"result.md: stale, code {digest(['tests/figures.py'])} of tests/figures.py\n"
    assert run() == (1, stale)
    assert run("--accept", "") == (1, stale)
    assert run("--accept", "a test")[0] == 0
    assert run() == (0, "")


def test_a_result_that_does_not_exist_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measured.py", str(tmp_path / "plan.md")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.endswith("plan.md: there is no such file; results are in benchmarks/results\n")
