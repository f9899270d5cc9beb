"""Secrets in URLs of manifests and of command lines: nothing that `prepare` writes or prints contains them."""

import logging
from pathlib import Path
from typing import Any

import pytest

from nestdata import NestError, PrepareConfig, ProbeMode, prepare_corpus
from tests.synthesis import hiss, read_jsonl, write_audio, write_jsonl

SECRET = "hunter2"
URLS = [
    f"s3://KEY:{SECRET}/x@bucket/a.wav",
    f"s3://KEY:{SECRET} x@bucket/a.wav",
    f"s3://KEY:{SECRET}%40bucket/a.wav",
    f"https://host/a.wav?jwt={SECRET}",
    f"https://host/a.wav#{SECRET}",
    f"https://host/a.wav;token={SECRET}",
    f"ftp://user:{SECRET}@host/a.wav",
    f" s3://KEY:{SECRET}@bucket/a.wav",
]


def recording(*sources: dict[str, Any]) -> dict[str, Any]:
    values = {"sampling_rate": 16000, "num_samples": 16000, "duration": 1.0, "channel_ids": [0, 1]}
    return {"id": f"s3://KEY:{SECRET}@bucket/a", "sources": list(sources), **values}


def manifest_of(folder: Path, form: str) -> Path:
    """Writes a manifest of one usable line, and one for each URL."""
    good = str(write_audio(folder / "good.wav", hiss(16000, 0)))
    if form == "nemo":
        rows = [{"audio_filepath": url, "duration": 1.0, "offset": 0.0} for url in (good, *URLS)]
        return write_jsonl(folder / "m.json", rows)
    if form == "lhotse":
        first = {"type": "file", "channels": [0], "source": good}
        others = [{"type": kind, "channels": [1], "source": url} for url in URLS for kind in ("file", "url")]
        others += [{"type": "shar_ptr", "channels": [1], "source": f"{url}?o=0&e=1024"} for url in URLS[:4]]
        rows = [recording(first), *(recording(first, other) for other in others)]
        return write_jsonl(folder / "m.jsonl", [{**row, "id": "good"} if not i else row for i, row in enumerate(rows)])
    (folder / "kaldi").mkdir()
    lines = [f"u{i} {url}\n" for i, url in enumerate([good, *(url.strip() for url in URLS)])]
    (folder / "kaldi" / "wav.scp").write_text("".join(lines))
    (folder / "kaldi" / "utt2dur").write_text("".join(f"u{i} 1.0\n" for i in range(len(lines))))
    return folder / "kaldi"


@pytest.mark.parametrize(("form", "probe"), [("nemo", "missing"), ("lhotse", "all"), ("kaldi", "all")])
def test_no_secret_of_a_line_is_in_a_file_of_the_corpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, probe: ProbeMode
) -> None:
    caplog.set_level(logging.DEBUG)
    manifest = manifest_of(tmp_path, form)
    report = prepare_corpus([manifest], tmp_path / "out" / "speech.corpus", PrepareConfig(probe=probe))
    assert report.num_cuts == 1
    assert report.rejected == {"invalid_url": sum(report.rejected.values())}
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in caplog.text
    rejects = read_jsonl(report.path / "rejected.jsonl")
    assert len(rejects) >= len(URLS)
    assert all(manifest.name in row["where"] and "***" in row["detail"] for row in rejects)


@pytest.mark.parametrize("url", URLS)
def test_no_secret_of_a_url_is_in_the_error_of_prepare(tmp_path: Path, url: str) -> None:
    tars = PrepareConfig(tars=(f"{url}.tar",))
    for inputs, output, config in (
        ([url], tmp_path / "a.corpus", None),
        ([f"{url}/"], tmp_path / "a.corpus", None),
        ([Path(url)], tmp_path / "a.corpus", None),
        (["m.json"], url, None),
        (["m.json"], tmp_path / "a.corpus", tars),
    ):
        with pytest.raises(NestError) as caught:
            prepare_corpus(inputs, output, config)
        assert SECRET not in str(caught.value)
    assert [*tmp_path.iterdir()] == []
