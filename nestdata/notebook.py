"""HTML that notebooks show of objects: tables, and sounds inside data URIs, without scripts or external resources."""

import base64
import wave
from collections.abc import Iterable, Sequence
from io import BytesIO

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from nestdata.errors import shortened
from nestdata.redaction import redacted

# A cell of a table longer than this is shortened.
_MAX_CHARACTERS = 300
_LEFT = 'style="text-align: left"'  # notebooks align cells to the right


def html_table(title: str, rows: Iterable[Sequence[str]], *, header: Sequence[str] = ()) -> str:
    """Returns a table as HTML.

    Text is escaped and shortened, and URLs are shown without their secrets; `Markup` is not changed.

    Args:
        title: Text above the table.
        rows: Cells of every row; the first cell is the name of the row.
        header: Names of the columns; none by default.
    """
    lines = [("td", row) for row in rows]
    lines = [("th", header), *lines] if header else lines
    body = "".join(
        f"<tr><th {_LEFT}>{_cell(row[0])}</th>{''.join(f'<{tag} {_LEFT}>{_cell(cell)}</{tag}>' for cell in row[1:])}"
        "</tr>"
        for tag, row in lines
    )
    num_columns = max((len(row) for _, row in lines), default=1)
    head = f"<thead><tr><th colspan='{num_columns}' {_LEFT}>{_cell(title)}</th></tr></thead>"
    return f"<table>{head}<tbody>{body}</tbody></table>"


def html_sound(samples: NDArray[np.float32], sampling_rate: int, label: str) -> Markup:
    """Returns a player of a sound, which is inside it as 16-bit WAV.

    Args:
        samples: Amplitudes in [-1, 1], shape (samples,).
        sampling_rate: In Hz.
        label: Description for people who do not see the player.
    """
    content = BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sampling_rate)
        scaled = np.rint(np.clip(np.nan_to_num(samples), -1.0, 1.0) * 32768.0)
        file.writeframes(np.minimum(scaled, 32767).astype("<i2").tobytes())
    return Markup('<audio controls preload="metadata" aria-label="{}" src="data:audio/wav;base64,{}"></audio>').format(
        _cell(label), base64.b64encode(content.getvalue()).decode()
    )


def _cell(text: str) -> Markup:
    if isinstance(text, Markup):
        return text
    printable = text.encode("utf-8", "backslashreplace").decode()  # ids may have characters that are not Unicode
    return escape(shortened(redacted(printable), _MAX_CHARACTERS))
