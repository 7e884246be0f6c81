"""How a figure reaches a notebook: plotly JSON and a PNG in one output, never widget state."""

import base64
import io
import json
import logging
import os
import queue
import threading
import warnings
from functools import cache

import plotly.graph_objects as go
from IPython.display import display
from PIL import Image

BROWSER_TIMEOUT_S = 60  # a cold start on a busy machine takes seconds
PLOTLY = "application/vnd.plotly.v1+json"
SERVED = "JPY_SESSION_NAME"  # Jupyter's server names the notebook so, nbclient does not
_ONE = threading.Lock()  # picture at a time


def show(fig: go.Figure) -> None:
    """Display a figure so that JupyterLab draws it live and GitHub shows its picture.

    The output holds plotly JSON and, where a Chromium is found, a PNG; without one, a single
    plain warning says so. In a notebook that somebody looks at, the PNG joins the output when it
    is ready: a Chromium takes seconds to start, and applications would not answer meanwhile.
    """
    bundle = {PLOTLY: json.loads(fig.to_json()), "text/plain": _plain(fig)}
    bundle[PLOTLY]["config"] = {"responsive": True, "displaylogo": False}
    if SERVED in os.environ:
        place = display(bundle, raw=True, display_id=True)
        threading.Thread(target=_complete, args=(place, bundle, fig), daemon=True).start()
        return
    _with_picture(bundle, fig)
    display(bundle, raw=True)


def _with_picture(bundle: dict, fig: go.Figure) -> bool:
    """Put a figure's PNG into its output; whether there is one."""
    if (picture := png(fig)) is not None:
        bundle["image/png"] = base64.b64encode(picture).decode()
    return picture is not None


def _complete(place, bundle: dict, fig: go.Figure) -> None:
    if _with_picture(bundle, fig):
        place.update(bundle, raw=True)


def png(fig: go.Figure) -> bytes | None:
    """A figure's picture at its own size, or None (after one warning) without a Chromium.

    Scale 1: JupyterLab shows a stored PNG at its pixel size, so a larger one would be cropped. 256
    colours: a figure has fewer, and a notebook holds its pictures.
    """
    with _ONE:
        if not _browser():
            return None
        drawn = Image.open(io.BytesIO(fig.to_image("png"))).convert("RGB")
    packed = io.BytesIO()
    drawn.quantize(256, dither=Image.Dither.NONE).save(packed, "png", optimize=True)
    return packed.getvalue()


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
    text = text.replace("</sup><br><sup>", " ")
    return text.replace("<br>", " ").replace("<b>", "").replace("</b>", "")
