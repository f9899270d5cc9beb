"""What tests of `prepare` compare of the corpora that it writes."""

from pathlib import Path

CORPUS_FILES = {"versions.npy", "cuts.jsonl", "index.npy", "meta.json", "rejected.jsonl"}


def tree(directory: Path) -> dict[str, bytes | None]:
    """Returns the content of all files in a directory except reports, by relative path; None for a folder."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.name != "report.html"
    }


def names_in(directory: Path) -> set[str]:
    """Returns the names of the files of a corpus, without the report and its audio."""
    return {path.name for path in directory.iterdir() if path.stem != "report"}
