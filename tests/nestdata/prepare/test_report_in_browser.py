"""The report in Chromium, opened as a file: sorting, filtering, playing, and what assistive technology is told.

Needs the `browser` extra and an installed Chromium or Chrome; playwright's own browsers are not downloaded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nestdata import PrepareConfig, prepare_corpus
from tests.synthesis import chirp, tone, write_audio, write_jsonl

LONG_NAME = "a-folder-with-a-name-that-has-no-spaces/" * 3 + "and_a_file_name_that_is_just_as_long.wav"
SAMPLES = "Samples of the cuts of this corpus"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    rows = []
    for i in range(12):
        write_audio(folder / f"cut-{i}.wav", chirp(200, 900, 1.0 + i / 4, 8000, level=0.5 * 0.8**i), 8000)
        rows.append({"audio_filepath": f"cut-{i}.wav", "lang": ("en", "sw")[i % 3 == 0], "text": f"words {i}"})
    write_audio(folder / "short.wav", tone(300, 0.05))
    (folder / "text.wav").write_text("not audio")
    rows += [{"audio_filepath": name} for name in ("short.wav", "text.wav", LONG_NAME)]
    prepare_corpus(
        [write_jsonl(folder / "speech.json", rows)], folder / "speech.corpus", PrepareConfig(report_samples=12)
    )
    return folder / "speech.corpus"


@pytest.fixture
def page(browser: Any, corpus: Path) -> Iterator[Any]:
    """The open report. In the end, it must have made no request but of files, and have logged nothing."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    logged: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: logged.append(message.text))
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.goto((corpus / "report.html").as_uri())
    yield page
    page.close()
    assert logged == []
    assert [url for url in requested if not url.startswith(corpus.as_uri())] == []


def column(page: Any, caption: str, index: int) -> list[str]:
    cells = page.get_by_role("table", name=caption).locator(f"tbody tr:visible > :nth-child({index})")
    return [text.strip() for text in cells.all_inner_texts()]


def sort_of(page: Any, header: str) -> str | None:
    table = page.get_by_role("table", name=SAMPLES)
    return table.get_by_role("columnheader", name=header).get_attribute("aria-sort")


def test_a_click_on_a_header_sorts_by_number(page: Any) -> None:
    seconds = [float(text) for text in column(page, SAMPLES, 4)]
    button = page.get_by_role("table", name=SAMPLES).get_by_role("button", name="seconds")
    button.click()
    assert sort_of(page, "seconds") == "ascending"
    assert [float(text) for text in column(page, SAMPLES, 4)] == sorted(seconds)
    button.click()
    assert sort_of(page, "seconds") == "descending"
    assert [float(text) for text in column(page, SAMPLES, 4)] == sorted(seconds, reverse=True)


def test_a_filter_shows_the_rows_with_all_words_and_their_number(page: Any) -> None:
    total = len(column(page, SAMPLES, 1))
    field = page.get_by_role("searchbox", name="Filter samples")
    field.fill("SW words")
    assert set(column(page, SAMPLES, 3)) == {"sw"}
    status = page.get_by_role("status").first
    assert status.inner_text() == f"4 of {total} rows"
    field.fill("no such words")
    assert status.inner_text() == f"0 of {total} rows"
    field.fill("")
    assert status.inner_text() == f"{total} of {total} rows"


def test_tables_are_complete_without_scripts(browser: Any, corpus: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((corpus / "report.html").as_uri())
    assert page.get_by_role("table").count() == 4
    assert page.get_by_role("button").count() == page.get_by_role("searchbox").count() == 0
    assert page.get_by_role("columnheader", name="reason").count() == 1
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(browser: Any, corpus: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra `browser` is not installed")
    page = browser.new_page(color_scheme=scheme)
    page.goto((corpus / "report.html").as_uri())
    found = axe.Axe().run(page).response
    assert [(violation["id"], [node["html"] for node in violation["nodes"]]) for violation in found["violations"]] == []
    assert len(found["passes"]) > 30
    page.close()
