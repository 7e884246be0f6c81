"""How a figure reaches a notebook: plotly JSON and a PNG in one output, never widget state."""

import base64
import json
import logging
import queue
import threading
import warnings
from functools import cache

import plotly.graph_objects as go
from IPython.display import display

BROWSER_TIMEOUT_S = 60  # a cold start on a busy machine takes seconds
PLOTLY = "application/vnd.plotly.v1+json"


def show(fig: go.Figure) -> None:
    """Display a figure so that JupyterLab draws it live and GitHub shows its picture.

    The output holds plotly JSON and, where a Chromium is found, a PNG; without one, a single
    plain warning says so.
    """
    bundle = {PLOTLY: json.loads(fig.to_json()), "text/plain": _plain(fig)}
    bundle[PLOTLY]["config"] = {"responsive": True, "displaylogo": False}
    if (picture := png(fig)) is not None:
        bundle["image/png"] = base64.b64encode(picture).decode()
    display(bundle, raw=True)


def png(fig: go.Figure) -> bytes | None:
    """A figure's picture at its own size, or None (after one warning) without a Chromium.

    Scale 1: JupyterLab shows a stored PNG at its pixel size, so a larger one would be cropped.
    """
    if not _browser():
        return None
    return fig.to_image("png")


@cache
def _browser() -> bool:
    """Start kaleido's browser once for all figures of this process; whether that worked."""
    logging.getLogger("kaleido").setLevel(logging.ERROR)
    logging.getLogger("choreographer").setLevel(logging.ERROR)
    # plotly passes options that a running server ignores, and warns of it at every picture.
    warnings.filterwarnings("ignore", message="The kopts argument is ignored")
    first = _first_picture()
    if isinstance(first, BaseException):
        warnings.warn(
            f"Figures carry no picture: no Chromium could be started ({type(first).__name__}). "
            "Install one (for example: apt-get install chromium) and run the notebook again.",
            stacklevel=3,
        )
    return not isinstance(first, BaseException)


def _first_picture() -> bytes | BaseException:
    """A picture by a newly started browser, or what went wrong.

    A browser that is found and does not start ends a thread of kaleido's, whose caller then waits
    for ever: so this waits in a thread of its own, and listens for how either one ends.
    """
    outcome: queue.Queue[bytes | BaseException] = queue.Queue()
    before = threading.excepthook

    def draw() -> None:
        import kaleido

        kaleido.start_sync_server(silence_warnings=True)
        outcome.put(go.Figure().to_image("png"))

    threading.excepthook = lambda ended: outcome.put(ended.exc_value or RuntimeError("no reason"))
    try:
        threading.Thread(target=draw, daemon=True).start()
        return outcome.get(timeout=BROWSER_TIMEOUT_S)
    except queue.Empty:
        return TimeoutError(f"no picture in {BROWSER_TIMEOUT_S} s")
    finally:
        threading.excepthook = before


def _plain(fig: go.Figure) -> str:
    text = fig.layout.title.text or "figure"
    return text.replace("<br>", " ").replace("<b>", "").replace("</b>", "")
