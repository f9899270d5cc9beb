"""Renders HTML pages from the templates of this package: each page is one file without external resources."""

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape


def write_page(path: Path, template: str, **values: Any) -> None:
    """Writes a page; all values are escaped, and characters that are not Unicode are written as escapes."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("nestdata"), autoescape=True, trim_blocks=True)
    environment.filters["breakable"] = _breakable
    page = environment.get_template(template).render(values)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _breakable(text: str) -> Markup:
    """Returns a text in which a browser may break lines after slashes and underscores, as in paths and ids."""
    # Neither mark occurs in what escaping inserts.
    return Markup(str(escape(text)).replace("/", "/<wbr>").replace("_", "_<wbr>"))
