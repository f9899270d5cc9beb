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
KINDS = {".css", ".gz", ".html", ".inv", ".ipynb", ".js", ".json", ".map", ".png", ".svg", ".xml"}
"""Suffixes of what the site may contain."""


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


def test_the_site_has_no_sources_and_no_caches(site: Path) -> None:
    assert {path.suffix for path in site.rglob("*") if path.is_file()} <= KINDS
    assert not list(site.rglob("__pycache__"))


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


@pytest.mark.parametrize(("width", "picture"), [(390, "data_path_tall.svg"), (1280, "data_path.svg")])
def test_the_first_picture_can_be_read_on_narrow_screens(site: Path, browser: Any, width: int, picture: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    image = page.locator("picture img")
    assert image.evaluate("image => image.decode().then(() => image.currentSrc)").endswith(f"/{picture}")
    assert image.evaluate("image => image.naturalWidth") > 0
    context.close()


@pytest.mark.parametrize(("scheme", "expected"), [("light", "default"), ("dark", "slate")])
def test_colours_are_those_of_the_system(site: Path, browser: Any, scheme: str, expected: str) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    assert page.locator("body").get_attribute("data-md-color-scheme") == expected
    context.close()
