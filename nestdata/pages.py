"""Renders HTML pages from the templates of this package: each page is one file without external resources.

A page has a content security policy that allows its own script, its own styles, and pictures and sound beside it, and
nothing else: text that got into a page as HTML by a mistake of its template could not run, load or send anything.
"""

import base64
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from nestdata.redaction import redacted


def write_page(path: Path, template: str, **values: Any) -> None:
    """Writes a page; all values are escaped, and characters that are not Unicode are written as escapes.

    URLs in values are shown without their secrets.
    """
    page = _environment().get_template(template).render(values)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nestdata"), autoescape=True, trim_blocks=True, finalize=_finalized
    )
    environment.filters["breakable"] = _breakable
    style, script = _source("page.css") + _bar_sizes(), _source("tables.js")
    environment.globals |= {"style": style, "script": script, "policy": _policy(style, script)}
    return environment


def _policy(style: str, script: str) -> str:
    """Returns the content security policy of pages with one style element and one script element.

    A page that is opened as a file has no origin, so that `'self'` does not mean the files beside it.
    """
    beside = "'self' file:"
    return (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src {beside}; "
        f"media-src {beside}; base-uri 'none'; form-action 'none'"
    )


def _digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _source(name: str) -> Markup:
    return Markup((resources.files("nestdata") / "templates" / name).read_text(encoding="utf-8"))


def _bar_sizes() -> Markup:
    """Returns classes for the bars of charts, because the policy does not allow styles in attributes."""
    return Markup("".join(f".high-{n} {{ height: {n}%; }} .wide-{n} {{ width: {n}%; }}\n" for n in range(101)))


def _finalized(value: Any) -> Any:
    return redacted(value) if type(value) is str else value  # markup has been finalized already


def _breakable(text: str) -> Markup:
    """Returns a text in which a browser may break lines after slashes and underscores, as in paths and ids."""
    # Escaping inserts neither slashes nor underscores.
    return Markup(str(escape(redacted(text))).replace("/", "/<wbr>").replace("_", "_<wbr>"))
