"""Draws the pictures of the README and the site: the data path, a preview, and a training curve.

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
    ("manifests", ("NeMo, Lhotse, fairseq,", "Kaldi, Hugging Face,", "folders of audio"), MUTED),
    ("corpus", ("cuts sorted by length,", "memory-mapped;", "rejects with reasons"), BLUE),
    ("plan", ("(step, microbatch)", "to cuts, computed,", "the same on any ranks"), BLUE),
    ("batch", ("decode, draw noise,", "mix at an exact SNR,", "pad to the bucket"), BLUE),
    ("network", ("mask noisy frames,", "predict tokens of", "the clean audio"), ORANGE),
    ("encoder", ("checkpoints, NeMo,", "Hugging Face, ONNX,", "features, probe"), MUTED),
)
ARROWS = ("prepare", "plan", "read", "train", "export")


def draw_data_path(path: Path) -> None:
    """Draws the stages from manifests to an encoder, as SVG."""
    box, gap, height, top, left = 168, 66, 112, 62, 12
    width = 2 * left + len(STAGES) * box + (len(STAGES) - 1) * gap
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 236" '
        'font-family="Helvetica, Arial, sans-serif">',
        '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        f'<path d="M0,0 L9,4 L0,8 z" fill="{MUTED}"/></marker></defs>',
        f'<rect width="{width}" height="236" rx="10" fill="{PAPER}"/>',
    ]

    def text(x: float, y: float, words: str, size: int, colour: str, weight: str = "normal") -> str:
        style = f'text-anchor="middle" font-size="{size}" fill="{colour}" font-weight="{weight}"'
        return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(words)}</text>'

    for number, (name, lines, colour) in enumerate(STAGES):
        x = left + number * (box + gap)
        parts.append(
            f'<rect x="{x}" y="{top}" width="{box}" height="{height}" rx="8" fill="white" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        parts.append(text(x + box / 2, top + 27, name, 19, colour, "bold"))
        for line, words in enumerate(lines):
            parts.append(text(x + box / 2, top + 54 + 20 * line, words, 15, INK))
        if number:
            start, middle = x - gap + 4, top + height / 2
            parts.append(
                f'<line x1="{start}" y1="{middle}" x2="{x - 4}" y2="{middle}" stroke="{MUTED}" stroke-width="2" '
                'marker-end="url(#tip)"/>'
            )
            parts.append(text(x - gap / 2, middle - 10, ARROWS[number - 1], 14, MUTED))
    centre = [left + number * (box + gap) + box / 2 for number in range(len(STAGES))]
    spans = (("nestdata", centre[1], centre[3]), ("nestmodel", centre[4], centre[5]))
    for name, first, last in spans:
        x, end, y = first - box / 2, last + box / 2, 40
        parts.append(f'<path d="M{x},{y + 12} V{y} H{end} V{y + 12}" fill="none" stroke="{MUTED}"/>')
        parts.append(text((x + end) / 2, y - 9, name, 17, INK, "bold"))
    note = "nestguard watches every process of a run, and names the one that holds up the others"
    parts.append(text(width / 2, 212, note, 15, MUTED))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


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
    draw_curve(arguments.demo / "run" / "version_0", PICTURES / "curve.png")
    copy_preview(arguments.demo / "preview" / f"{arguments.cut}.png", PICTURES / "preview.png")
    sizes = {path.name: path.stat().st_size for path in sorted(PICTURES.iterdir())}
    sys.stdout.write("".join(f"{size:8} {name}\n" for name, size in sizes.items()))
    return int(sum(sizes.values()) > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
