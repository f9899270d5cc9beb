"""Draws the pictures of the README and the site: the data path, attention contexts, a preview, a training curve.

    make demo
    .venv/bin/python docs/make_pictures.py

The preview and the curve are those of `make demo`. All pictures together stay below 300 KB.
"""

import argparse
import html
import sys
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
MAX_BYTES = 300_000

INK, MUTED, BLUE, ORANGE, PAPER = "#22303a", "#5d6b75", "#2f6f9f", "#b5532a", "#f5f7f9"

STAGES = (
    ("manifests", ("folders of audio,", "NeMo, Lhotse, Kaldi,", "Hugging Face, tars"), MUTED),
    ("corpus", ("cuts by length,", "memory-mapped;", "rejects, with reasons"), BLUE),
    ("plan", ("(step, microbatch)", "to cuts; the same", "on any ranks"), BLUE),
    ("batch", ("decode, draw noise,", "mix at an exact SNR,", "pad to the bucket"), BLUE),
    ("network", ("mask noisy frames,", "predict tokens of", "the clean audio"), ORANGE),
    ("encoder", ("checkpoints, NeMo,", "Hugging Face, ONNX,", "features, probe"), MUTED),
)
ARROWS = ("prepare", "plan", "read", "train", "export")
PACKAGES = (("nestdata", 1, 3), ("nestmodel", 4, 5))  # first and last stage
NOTE = ("nestguard watches every process of a run,", "and names the one that holds up the others")


def widest(words: str, size: int) -> float:
    """Returns the width in DejaVu Sans, the widest font that may take the place of Helvetica."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), words, size=size, prop=FontProperties(family="DejaVu Sans")).get_extents().width)


class Drawing:
    """Collects the elements of an SVG."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            f'<path d="M0,0 L9,4 L0,8 z" fill="{MUTED}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def text(
        self, x: float, y: float, words: str, size: int, colour: str, *, bold: bool = False, turn: str = ""
    ) -> None:
        """Adds centred text; `turn` is a transform such as a rotation."""
        style = f'text-anchor="middle" font-size="{size}" fill="{colour}" font-weight="{"bold" if bold else "normal"}"'
        style += f' transform="{turn}"' if turn else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(words)}</text>')

    def stage(self, number: int, x: float, y: float, width: float, height: float) -> None:
        """Adds the box of a stage."""
        name, lines, colour = STAGES[number]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="white" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        self.text(x + width / 2, y + 27, name, 19, colour, bold=True)
        for line, words in enumerate(lines):
            if widest(words, 15) > width - 8:
                raise ValueError(f"{words!r} does not fit into its box in a wide font")
            self.text(x + width / 2, y + 54 + 20 * line, words, 15, INK)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Adds an arrow."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{MUTED}" stroke-width="2" '
            'marker-end="url(#tip)"/>'
        )

    def square(self, x: float, y: float, size: float, colour: str) -> None:
        """Adds a square."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" fill="{colour}" stroke="{PAPER}"/>'
        )

    def bracket(self, path: str) -> None:
        """Adds a bracket, as the path of a line."""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{MUTED}"/>')

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n", encoding="utf-8")


def draw_data_path(path: Path) -> None:
    """Draws the stages from manifests to an encoder, from left to right."""
    box, gap, height, top, left = 168, 66, 112, 62, 12
    width = 2 * left + len(STAGES) * box + (len(STAGES) - 1) * gap
    drawing = Drawing(width, 236)
    for number in range(len(STAGES)):
        x = left + number * (box + gap)
        drawing.stage(number, x, top, box, height)
        if number:
            middle = top + height / 2
            drawing.arrow(x - gap + 4, middle, x - 4, middle)
            drawing.text(x - gap / 2, middle - 10, ARROWS[number - 1], 14, MUTED)
    for name, first, last in PACKAGES:
        start, end, y = left + first * (box + gap), left + last * (box + gap) + box, 40
        drawing.bracket(f"M{start},{y + 12} V{y} H{end} V{y + 12}")
        drawing.text((start + end) / 2, y - 9, name, 17, INK, bold=True)
    drawing.text(width / 2, 212, " ".join(NOTE), 15, MUTED)
    drawing.write(path)


def draw_tall_data_path(path: Path) -> None:
    """Draws the same stages from top to bottom, for narrow screens."""
    box, gap, height, top, left = 252, 42, 112, 16, 60
    width, centre = 360, left + box / 2
    drawing = Drawing(width, top + len(STAGES) * (height + gap) + 40)
    for number in range(len(STAGES)):
        y = top + number * (height + gap)
        drawing.stage(number, left, y, box, height)
        if number:
            drawing.arrow(centre, y - gap + 4, centre, y - 4)
            drawing.text(centre + 36, y - gap / 2 + 5, ARROWS[number - 1], 14, MUTED)
    for name, first, last in PACKAGES:
        start, end, x = top + first * (height + gap), top + last * (height + gap) + height, 40
        drawing.bracket(f"M{x + 12},{start} H{x} V{end} H{x + 12}")
        middle = (start + end) / 2
        drawing.text(x - 10, middle, name, 17, INK, bold=True, turn=f"rotate(-90 {x - 10} {middle:g})")
    for line, words in enumerate(NOTE):
        drawing.text(width / 2, top + len(STAGES) * (height + gap) + 4 + 20 * line, words, 14, MUTED)
    drawing.write(path)


def draw_contexts(path: Path) -> None:
    """Draws which frames a frame attends to with each style of attention context."""
    from nestmodel.nn.attention import visible_keys

    num_frames, cell, top, left, gap = 12, 20, 74, 70, 110
    drawing = Drawing(2 * (left + num_frames * cell) + gap - left + 20, top + num_frames * cell + 20)
    for number, style in enumerate(("regular", "chunked_limited")):
        x = left + number * (num_frames * cell + gap)
        drawing.text(x + num_frames * cell / 2, 28, f"{style}, context 6,2", 17, INK, bold=True)
        drawing.text(x + num_frames * cell / 2, top - 14, "attends to frame", 14, MUTED)
        middle = top + num_frames * cell / 2
        drawing.text(x - 16, middle, "frame", 14, MUTED, turn=f"rotate(-90 {x - 16} {middle:g})")
        is_visible = visible_keys(num_frames, (6, 2), style)
        for query in range(num_frames):
            for key in range(num_frames):
                colour = "white" if not is_visible[query, key] else BLUE if key <= query else ORANGE
                drawing.square(x + key * cell, top + query * cell, cell, colour)
    drawing.write(path)


def draw_curve(metrics: Path, path: Path) -> None:
    """Draws the training loss of the demo run beside the entropy of its tokens."""
    import numpy as np
    from matplotlib.figure import Figure

    from nestmodel.training.callbacks.curves import read_metrics, smooth

    series = read_metrics(metrics)
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axis = figure.subplots()
    for name, label, colour in (
        ("train_loss", "training loss", BLUE),
        ("train_token_entropy", "entropy of the tokens: no better than guessing", ORANGE),
    ):
        steps, values = series[name][0], np.array(series[name][1])
        axis.plot(steps, values, color=colour, linewidth=0.5, alpha=0.35)
        axis.plot(steps, smooth(values), color=colour, label=label)
    axis.set(xlabel="optimizer step", ylabel="nats")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)


def copy_preview(source: Path, path: Path) -> None:
    """Copies one picture of the preview, scaled down."""
    from PIL import Image

    with Image.open(source) as picture:
        small = picture.convert("RGB").resize(
            (picture.width * 3 // 4, picture.height * 3 // 4), Image.Resampling.LANCZOS
        )
        small.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> int:
    """Draws all pictures; returns 1 if they are too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("demo"), help="output directory of `make demo`")
    parser.add_argument("--cut", default="05", help="number of the cut in the preview")
    arguments = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    draw_data_path(PICTURES / "data_path.svg")
    draw_tall_data_path(PICTURES / "data_path_tall.svg")
    draw_contexts(PICTURES / "contexts.svg")
    draw_curve(arguments.demo / "run" / "version_0", PICTURES / "curve.png")
    copy_preview(arguments.demo / "preview" / f"{arguments.cut}.png", PICTURES / "preview.png")
    sizes = {path.name: path.stat().st_size for path in sorted(PICTURES.iterdir())}
    sys.stdout.write("".join(f"{size:8} {name}\n" for name, size in sizes.items()))
    return int(sum(sizes.values()) > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
