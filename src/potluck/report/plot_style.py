"""How the lab's pictures look: colours that people with colour-blindness can tell apart, and empty figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1f2430"
GREY = "#6b7280"
PALE = "#d9dde3"

# From Okabe and Ito's palette.
COMPUTE = "#0072b2"
SEND = "#d55e00"
RECEIVE = "#009e73"
WAIT = "#d3d8df"
LANE = "#f4f5f7"
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
