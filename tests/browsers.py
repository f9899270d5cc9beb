"""Opens an installed Chromium or Chrome for tests, which are skipped without one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yields a browser of playwright, whose own browsers are not downloaded."""
    reason = "playwright is not installed (the extra `browser`)"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} is on the path")
    with sync_api.sync_playwright() as playwright:
        # No sandbox, because it is not available to root and in most containers.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()
