"""Reads the tables of `report.html`."""

import html
import re
from pathlib import Path

Row = list[str]


def rows_of(page: Path, table: str) -> list[Row]:
    """Returns the texts of the cells of a table, by the name of its rows; a player gives the file that it plays."""
    body = page.read_text().split(f'data-tools="{table}"')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = []
    for row in body.split("<tr>")[1:]:
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
        plays = [re.search(r'src="([^"]*)"', cell) for cell in cells]
        texts = [html.unescape(" ".join(re.sub(r"<[^>]*>", "", cell).split())) for cell in cells]
        rows.append([play[1] if play else text for play, text in zip(plays, texts, strict=True)])
    return rows
