"""The content security policy of pages, in Chromium, opened as files."""

import os
from pathlib import Path
from typing import Any

import pytest

from nestdata import AudioNoiseDataset, BatchPlan, Corpora, PlanConfig, prepare_corpus, write_preview
from tests.synthesis import chirp, write_audio, write_jsonl

HOSTILE = "<script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
REFUSED = "Content Security Policy"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The pages of a corpus and of a batch of it, whose ids and labels are HTML."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = []
    for i in range(4):
        name = f"{HOSTILE.replace('/', '')}{i}.wav"
        write_audio(folder / name, chirp(200, 900, 1.0 + i, 8000), 8000)
        rows.append({"audio_filepath": name, "lang": HOSTILE, "text": HOSTILE, "speaker": HOSTILE})
    rows.append({"audio_filepath": f"missing{HOSTILE}.wav"})
    report = prepare_corpus([write_jsonl(folder / "speech.json", rows)], folder / "speech.corpus")
    corpora = Corpora.open([report.path])
    plan = BatchPlan.of(corpora, PlanConfig(max_batch_seconds=20.0, microbatches_per_step=1))
    preview = write_preview(AudioNoiseDataset(corpora, plan)[0, 0], corpora.sampling_rate, folder / "preview")
    return [report.path / "report.html", preview]


def opened(browser: Any, page_path: Path) -> tuple[Any, list[str]]:
    page, logged = browser.new_page(), list[str]()
    page.on("console", lambda message: logged.append(message.text))
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.goto(page_path.as_uri())
    return page, logged


def test_pages_use_their_own_script_styles_sound_and_pictures(browser: Any, pages: list[Path]) -> None:
    for path in pages:
        page, logged = opened(browser, path)
        assert page.get_by_role("searchbox").count() > 0  # the script has run
        assert page.locator("table").first.evaluate("table => getComputedStyle(table).borderCollapse") == "collapse"
        player = page.locator("audio").first
        player.evaluate("player => { player.muted = true; return player.play(); }")
        assert player.evaluate("player => player.duration") > 0
        for picture in page.locator("img").all():
            assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") > 0
        assert page.title() != "ran"
        assert logged == []
        page.close()


@pytest.mark.parametrize(
    "html",
    [
        HOSTILE,
        "<script src='extra.js'></script>",
        "<img src='https://host.invalid/x.png'>",
        "<a id='go' href='javascript:document.title = `ran`'>x</a>",
        "<base href='https://host.invalid/'>",
    ],
)
def test_html_that_got_into_a_page_does_nothing(browser: Any, pages: list[Path], html: str) -> None:
    for path in pages:
        (path.parent / "extra.js").write_text("document.title = 'ran'")
        (path.parent / "extra.html").write_text("<p>extra</p>")
        damaged = path.with_name(f"{os.getpid()}.html")
        text = path.read_text()
        damaged.write_text(text.replace("<main", f"{html}<main", 1))
        page, logged = opened(browser, damaged)
        if page.locator("#go").count():
            page.locator("#go").click()
        assert page.title() != "ran"
        assert any(REFUSED in line for line in logged)
        page.close()
