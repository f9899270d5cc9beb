"""Builds the documentation site and opens it from files in Chromium, as somebody does who unpacks it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
PHONE = {"width": 390, "height": 844}


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


def watched_page(context: Any, problems: list[str]) -> Any:
    """Returns a page; what its scripts report, and what it loads from elsewhere, are added to `problems`."""
    page = context.new_page()
    page.on("console", lambda message: problems.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.on("request", lambda request: problems.extend([request.url] if not is_local(request.url) else []))

    def failed(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the next page was opened before the icon of this one had come
            problems.append(f"{page.url}: {request.url}: {request.failure}")

    page.on("requestfailed", failed)
    return page


def is_local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "about:"))


def test_search_finds_words_without_a_server(site: Path, browser: Any) -> None:
    problems: list[str] = []
    page = watched_page(browser, problems)
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("stall guard")
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    assert first.get_attribute("href").partition("?")[0].endswith("/stall-guard.html")  # not a result or a decision
    assert problems == []
    page.close()


def test_pages_fit_a_phone_and_load_nothing_from_elsewhere(site: Path, browser: Any) -> None:
    problems: list[str] = []
    context = browser.new_context(viewport=PHONE)
    pages = [*sorted(site.glob("*.html")), site / "api/nestdata.html", site / "decisions/index.html"]
    pages.remove(site / "404.html")  # has absolute addresses, for a server
    assert len(pages) > 20
    page = watched_page(context, problems)
    for path in pages:
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        problems += [f"{path.name} is {width} pixels wide"] if width > PHONE["width"] else []
    assert problems == []
    context.close()
