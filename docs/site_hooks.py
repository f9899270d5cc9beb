"""Adds files from outside docs/ to the site, and rewrites the links that lead to them.

The README is the first page of the site. The pages link to measurements, manifests and sources by paths that work in
the repository. Markdown and pictures among them become pages of the site; a link to any other file becomes its path in
code style.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Pages that the search lists after the guides.
BACKGROUND = ("CHANGELOG.md", "api/", "benchmarks/", "decisions/", "results.md")
ADDED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "benchmarks/README.md",
    "examples/README.md",
    "examples/finetune_ctc/README.md",
    "manifests/README.md",
    "recipes/continued_pretraining/README.md",
    "recipes/librispeech/README.md",
)
ADDED_FOLDERS = ("benchmarks/results",)
# A picture that is HTML, because it has a variant for narrow screens.
_PICTURE = re.compile(r'\b(src|srcset)="([^":]+)"')
# Code in text, and commands, both of which wrap; and words in them.
_WRAPS = re.compile(r'<code>[^<]*</code>|<div class="language-sh.*?</div>', re.DOTALL)
_HYPHENATED = re.compile(r"(?<=[\s>])[^\s<>]*-[^\s<>]*(?![^<]*>)")
_LONGEST_WHOLE = 36
# The text of a link may be wrapped over lines, but not over paragraphs.
_LINK = re.compile(r"(!?)\[((?:[^\]\n]|\n(?!\s*\n))*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files, under their paths in the repository."""
    repository = _repository(config)
    folders = [path for folder in ADDED_FOLDERS for path in sorted((repository / folder).glob("*"))]
    for path in [*(repository / name for name in ADDED), *folders]:
        if path.suffix in (".md", ".png", ".svg") and path.exists():
            uri = path.relative_to(repository).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links, which are relative to the file in the repository, to be relative to the page in the site."""
    if page.file.src_uri.startswith(BACKGROUND):
        page.meta["search"] = {"boost": 0.001}  # a word in a title counts a thousand times as much as in a text
    repository = _repository(config)
    source = Path(str(page.file.abs_src_path)).resolve()
    here = posixpath.dirname(page.file.src_uri)

    def site_uri(target: str) -> str | None:
        path = Path(os.path.normpath(source.parent / target))
        uri = path.relative_to(repository).as_posix() if path.is_relative_to(repository) else ""
        uri = uri.removeprefix("docs/")
        return posixpath.relpath(uri, here or ".") if files.get_file_from_path(uri) is not None else None

    def rewrite(match: re.Match[str]) -> str:
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = Path(os.path.normpath(source.parent / target))
        if "://" in target or not path.is_relative_to(repository):
            return match[0]
        uri = site_uri(target)
        if uri is not None:
            return f"{mark}[{text}]({uri}{anchor})"
        name = path.relative_to(repository).as_posix()
        if path.is_dir():
            return f"{text} (`{name}/`)"
        return f"`{name}`" if path.exists() else match[0]

    def rewrite_picture(match: re.Match[str]) -> str:
        return f'{match[1]}="{site_uri(match[2]) or match[2]}"'

    return _PICTURE.sub(rewrite_picture, _LINK.sub(rewrite, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Keeps browsers from breaking options and names at their hyphens, if they fit on a narrow screen."""

    def whole(match: re.Match[str]) -> str:
        return f'<span class="whole">{match[0]}</span>' if len(match[0]) <= _LONGEST_WHOLE else match[0]

    return _WRAPS.sub(lambda code: _HYPHENATED.sub(whole, code[0]), html)


def _repository(config: MkDocsConfig) -> Path:
    """Returns the folder of `mkdocs.yml`."""
    return Path(str(config.config_file_path)).resolve().parent
