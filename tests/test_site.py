"""Builds the documentation site and opens it from files in Chromium, as somebody does who unpacks it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed (the extra `docs`)")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.mark.parametrize(
    ("words", "page_of_them"),
    [
        ("stall guard", "stall-guard"),  # not a result or a decision
        ("epoch", "how-a-batch-is-chosen"),  # not the API
        ("out of memory", "gpu"),
        ("m4a", "formats"),
        ("--pcm", "formats"),
    ],
)
def test_search_finds_words_without_a_server_and_loads_nothing_from_elsewhere(
    site: Path, browser: Any, words: str, page_of_them: str
) -> None:
    problems: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type(words)
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    assert first.get_attribute("href").partition("?")[0].endswith(f"/{page_of_them}.html")
    assert problems == []
    page.close()
