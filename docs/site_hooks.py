"""Adds files from outside docs/ to the site, and rewrites the links that lead to them.

The pages link to measurements, manifests and sources by paths that work in the repository. Markdown and pictures
among them become pages of the site; a link to any other file becomes its path in code style.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
ADDED = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md", "manifests/README.md")
ADDED_FOLDERS = ("benchmarks/results",)
_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files, under their paths in the repository."""
    folders = [path for folder in ADDED_FOLDERS for path in sorted((REPOSITORY / folder).iterdir())]
    for path in [*(REPOSITORY / name for name in ADDED), *folders]:
        if path.suffix in (".md", ".png", ".svg"):
            uri = path.relative_to(REPOSITORY).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrites links, which are relative to the file in the repository, to be relative to the page in the site."""
    source = Path(str(page.file.abs_src_path)).resolve()
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in target:
            return match[0]
        path = Path(os.path.normpath(source.parent / target))
        if not path.is_relative_to(REPOSITORY):
            return match[0]
        uri = path.relative_to(REPOSITORY).as_posix()
        uri = uri.removeprefix("docs/") if uri.startswith("docs/") else uri
        if path.is_dir():
            return f"{text} (`{path.relative_to(REPOSITORY).as_posix()}/`)"
        if files.get_file_from_path(uri) is not None:
            return f"{mark}[{text}]({posixpath.relpath(uri, here or '.')}{anchor})"
        return f"`{path.relative_to(REPOSITORY).as_posix()}`" if path.exists() else match[0]

    return _LINK.sub(rewrite, markdown)
