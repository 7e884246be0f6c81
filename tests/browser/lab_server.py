"""JupyterLab on 127.0.0.1 and Chromium pages on it, for the browser tests and `make bench-ui`."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
]
SIZE = {"width": 1280, "height": 1000}
# No question about news; and every cell is drawn, in sight or not.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
READY_S, CELLS_S = 60, 240

# Errors of JupyterLab's and anywidget's own that say nothing about a notebook; anywidget reports a
# widget that opened in more than 2 s, and draws it all the same.
NOISE = (
    "favicon",
    "/lab/api/workspaces",
    "ResizeObserver loop",
    "[anywidget] Failed to initialize",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's Chromium, headless."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        yield browser
        browser.close()


class Lab:
    """A running JupyterLab over a folder."""

    def __init__(self, port: int, token: str):
        self.port, self.token = port, token

    def open(self, browser: Browser, name: str, side_bar: bool = False) -> "Notebook":
        """A notebook in a fresh page, its console and its requests watched."""
        page = browser.new_context(viewport=SIZE).new_page()
        opened = Notebook(page)
        page.goto(f"http://127.0.0.1:{self.port}/lab/tree/{name}?token={self.token}&reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=1000 * READY_S)
        if not side_bar:
            page.keyboard.press("Control+b")
        return opened


class Notebook:
    """A page of JupyterLab that shows one notebook."""

    def __init__(self, page: Page):
        self.page, self.errors, self.outside = page, [], []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self._failed(str(error)))
        page.on("request", self._asked)

    def _heard(self, message) -> None:
        if message.type == "error":
            self._failed(f"{message.text[:300]} {message.location.get('url', '')}")

    def _failed(self, what: str) -> None:
        if not any(noise in what for noise in NOISE):
            self.errors.append(what)

    def _asked(self, request) -> None:
        if not request.url.startswith(
            (f"http://127.0.0.1:{self._port}", "data:", "blob:", f"ws://127.0.0.1:{self._port}")
        ):
            self.outside.append(request.url[:200])

    @property
    def _port(self) -> str:
        return self.page.url.partition("127.0.0.1:")[2].partition("/")[0]

    def run_all(self) -> None:
        """Run all cells, and wait until the kernel has finished them."""
        page = self.page
        # NOTE: before the kernel is up, Run opens the dialog "Select Kernel".
        page.wait_for_selector("#jp-main-statusbar >> text=/\\| Idle/", timeout=1000 * READY_S)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_selector(".jp-InputPrompt >> text=/\\[\\*\\]/", timeout=1000 * READY_S)
        page.wait_for_function(
            "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')]"
            ".every(e => /\\[\\d+\\]/.test(e.innerText))",
            timeout=1000 * CELLS_S,
        )

    def screenshot(self, path: Path, app: "AppOnPage | None" = None) -> None:
        """The whole notebook, or one of its apps: the window is made as high as its content."""
        content = self.page.locator(".jp-WindowedPanel-outer").first
        height = int(content.evaluate("e => e.scrollHeight")) + 120
        self.page.set_viewport_size(SIZE | {"height": min(height, 12_000)})
        content.evaluate("e => e.scrollTo(0, 0)")
        self.page.wait_for_timeout(500)
        (app.root if app else self.page).screenshot(path=path)
        self.page.set_viewport_size(SIZE)

    def figures(self) -> int:
        """Figures of outputs, drawn live by plotly.js or shown as pictures that have loaded."""
        return self.page.locator(".jp-OutputArea-output").evaluate_all(
            "es => es.filter(e => !e.querySelector('.shadowkv') && (e.querySelector('.main-svg') "
            "|| [...e.querySelectorAll('img')].some(i => i.naturalWidth > 0))).length"
        )

    def app(self, number: int = 0) -> "AppOnPage":
        return AppOnPage(self.page, number)


class AppOnPage:
    """One of the lab's applications in a notebook page, used as a person would."""

    def __init__(self, page: Page, number: int):
        self.page = page
        self.root = page.locator(".jp-OutputArea .shadowkv").nth(number)

    def slider(self, label: str):
        """The handle of the slider with this label."""
        row = self.root.locator(".widget-inline-hbox", has_text=label)
        return row.locator(".noUi-handle").first

    def readout(self, label: str) -> str:
        return (
            self.root.locator(".widget-inline-hbox", has_text=label)
            .locator(".widget-readout")
            .first.inner_text()
        )

    def code(self) -> str:
        return self.root.locator(".shadowkv-code").inner_text()

    def titles(self) -> list[str]:
        """Each figure's title as plotly.js has it, line breaks as spaces; "" before it is drawn."""
        return self.root.locator(".js-plotly-plot").evaluate_all(
            "es => es.map(e => (e.layout?.title?.text ?? '').replaceAll('<br>', ' ')"
            ".replaceAll(/<[^>]+>/g, ''))"
        )

    def bars(self) -> list[str]:
        """The drawn paths of the first figure's bars."""
        return (
            self.root.locator(".js-plotly-plot")
            .first.locator(".bars path")
            .evaluate_all("es => es.map(e => e.getAttribute('d'))")
        )

    def wait_for(self, **settings) -> None:
        """Wait until the line to paste names these settings."""
        for name, value in settings.items():
            expect(self.root.locator(".shadowkv-code")).to_contain_text(
                f"{name}={value}", timeout=15_000
            )


@contextmanager
def served(root: Path, *options: str) -> Iterator[Lab]:
    """JupyterLab over `root` with settings, workspaces and state of its own."""
    token = secrets.token_hex(8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        Path(scratch, "lab.log").open("w") as log,
    ):
        places = {
            name: f"{scratch}/{name}"
            for name in (
                "JUPYTER_CONFIG_DIR",
                "JUPYTER_DATA_DIR",
                "JUPYTERLAB_SETTINGS_DIR",
                "JUPYTERLAB_WORKSPACES_DIR",
                "JUPYTER_RUNTIME_DIR",
                "IPYTHONDIR",
            )
        }
        places["JUPYTER_CONFIG_PATH"] = configuration(Path(scratch, "make"))
        for name, values in SETTINGS.items():
            file = Path(
                places["JUPYTERLAB_SETTINGS_DIR"], f"@jupyterlab/{name}.jupyterlab-settings"
            )
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(values))
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyterlab",
                "--no-browser",
                "--allow-root",
                "--ip=127.0.0.1",
                f"--port={port}",
                "--ServerApp.port_retries=0",
                f"--IdentityProvider.token={token}",
                f"--ServerApp.root_dir={root}",
                "--LabApp.extension_manager=readonly",
                "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                *options,
            ],
            env=os.environ | places,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/api/status?token={token}", server, Path(log.name))
            yield Lab(port, token)
        finally:
            server.terminate()  # it shuts its kernels down first
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:  # a busy kernel may hold it up; they end with it
                server.kill()
                server.wait(60)


def configuration(folder: Path) -> str:
    """Jupyter's configuration as `make` writes it beside the interpreter, written to `folder`."""
    plan = subprocess.run(
        ["make", "-n", "setup", f"VENV={folder}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    steps = [step for step in plan.splitlines() if step.startswith(("mkdir", "printf"))]
    subprocess.run(["sh", "-ec", "\n".join(steps)], check=True)
    return str(folder / "etc" / "jupyter")


def _wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=1)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab does not answer: {log.read_text()[-2000:]}")
