"""The style and the files of pictures, with colours that people with colour-blindness can distinguish."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from potluck.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")

INK = "#1f2430"
GREY = "#6b7280"
PALE = "#d9dde3"

# From Okabe and Ito's palette.
COMPUTE = "#0072b2"
SEND = "#d55e00"
RECEIVE = "#009e73"
WAIT = "#d3d8df"
GROUND = "#f4f5f7"
FAULT = "#cc3311"

_STRATEGIES = {
    "solo": "#7a818c",
    "ddp": "#d55e00",
    "ddp-balanced": "#c98a00",
    "potluck": "#0072b2",
    "hivemind": "#b6548c",
    "torchft": "#009e73",
    "ray-ps-sync": "#7f7f7f",
    "ray-ps-async": "#bcbd22",
}


def colour_of(strategy: str) -> str:
    """A strategy has one colour in all pictures."""
    return _STRATEGIES.get(strategy, INK)


def new_figure(width_in: float, height_in: float) -> Figure:
    """Figure and canvas by hand: pyplot would keep global state and look for a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def check_file(path: Path) -> None:
    """Raise an error before the work if the picture cannot be drawn or written."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"cannot draw {path}", hint="give a name that ends in .png or .svg")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", hint="make it first, or choose another")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "a picture needs matplotlib, which is not installed", hint="pip install -e '.[plots]'"
        ) from None


def save(figure: Figure, path: Path) -> None:
    """Write a picture to a file, which is replaced only when the picture is complete."""
    part = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(part, dpi=150, format=path.suffix[1:].lower())
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}", hint="choose another file") from error
    finally:
        part.unlink(missing_ok=True)
