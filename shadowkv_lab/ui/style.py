"""How every figure of the lab looks: one colour a strategy, one pattern a provenance."""

import plotly.graph_objects as go

from shadowkv_lab.strategies import STRATEGIES

# Okabe and Ito's colour-blind-safe palette, without its yellow, which is too pale for thin lines,
# then three of Paul Tol's "muted" set.
PALETTE = (
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
)
OTHERS = (*PALETTE[len(STRATEGIES) :], "#777777", "#bbbbbb")  # for what is no strategy

# Where a number comes from, by word and by fill pattern; never by colour.
PATTERNS = {"measured": "", "recorded": "/", "calibrated": "x", "assumed": "."}
DASHES = {"measured": "solid", "recorded": "dash", "calibrated": "dashdot", "assumed": "dot"}
PHASE_OPACITY = {"cast": 1.0, "attention": 0.62, "write": 0.3, "rest": 0.12}

FONT = "Inter, Helvetica, Arial, sans-serif"
WIDTH, HEIGHT = 860, 420
LOG = {"type": "log", "dtick": "D2", "tickformat": ",~g"}  # ticks at 1, 2 and 5 of each decade


def colour(label: str) -> str:
    """The colour of a strategy, by the name its label begins with; the same in every figure."""
    names = list(STRATEGIES)
    name = label.split("(")[0]
    return PALETTE[names.index(name) % len(PALETTE)] if name in names else "#666666"


def marker(label: str) -> dict:
    """A strategy's points on a line. BF16's line lies under the shadow's: its rings show it."""
    ring = label.split("(")[0] == "bf16_pool"
    return dict(size=12, symbol="circle-open", line_width=2) if ring else dict(size=6)


def title(label: str) -> str:
    """A strategy's label in plain words: "shadow(layers=26)" is "shadow buffer (layers=26)"."""
    name, _, options = label.partition("(")
    plain = STRATEGIES[name].title if name in STRATEGIES else name
    return f"{plain} ({options}" if options else plain


def figure(
    heading: str, x: str, y: str, *, log_x: bool = False, log_y: bool = False, height: int = HEIGHT
) -> go.Figure:
    """An empty figure in the house style. `heading` states the finding; axes carry units."""
    axis = dict(
        showline=True, linecolor="#888", gridcolor="#e6e6e6", zeroline=False, ticks="outside"
    )
    # One call: plotly checks a layout given at once in a tenth of the time of an update.
    return go.Figure(
        layout=dict(
            title=dict(text=heading, font=dict(size=16), x=0, xref="paper", xanchor="left"),
            font=dict(family=FONT, size=13, color="#222"),
            width=WIDTH,
            height=height,
            margin=dict(l=70, r=20, t=70, b=90),
            plot_bgcolor="white",
            paper_bgcolor="white",
            hovermode="closest",
            legend=dict(
                orientation="h", traceorder="normal", x=0, xanchor="left", y=-0.2, yanchor="top"
            ),
            xaxis=dict(title=x, **axis, **(LOG if log_x else {})),
            yaxis=dict(title=y, **axis, **(LOG if log_y else {})),
        )
    )


def legend_entry(name: str, opacity: float) -> dict:
    """A bar's entry in the legend that stands for an opacity, whatever the colour.

    A colour of its own: legends do not show a marker's opacity.
    """
    return dict(
        type="bar", x=[None], y=[None], name=name, marker=dict(color=f"rgba(60,60,60,{opacity})")
    )
