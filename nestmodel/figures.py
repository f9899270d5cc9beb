"""Colours and set-up that the figures of this package share."""

from typing import Any

BLUE = "#2f6f9f"
ORANGE = "#b5532a"
GREY = "#4b4b4b"
PALE_BLUE = "#9db8cc"
PALE_ORANGE = "#d9b8a6"


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure whose layout fits its labels. matplotlib is imported here.

    The figure is created without pyplot, so that no display is needed and no global state changes.

    Args:
        width: Width in inches.
        height: Height in inches.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def finish_axes(axes: Any, title: str, *, has_legend: bool) -> None:
    """Adds a title, a grid and optionally a legend to axes that are already drawn."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    if has_legend:
        axes.legend(fontsize=8)
