"""JupyterLab on copies of the notebooks at size tiny, and pages of it in Debian's chromium: for test_browser.py."""

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import nbformat

ROOT = Path(__file__).parents[1]
SHOTS = ROOT / "runs" / "browser"  # screenshots; not in git
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Nothing but this machine's page: no sandbox (root has none), no GPU, and no calls home.
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync""".split()
SETTINGS = {  # of JupyterLab: every cell in the page, also those out of sight; no questions about news
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}
START, RUN = 90, 300  # seconds for the server or a kernel, and for a whole notebook
ERROR = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']"  # tracebacks, and what goes to stderr


def copy_tiny(notebook: Path, folder: Path, out: Path) -> Path:
    """A copy of a notebook whose parameters cell says size tiny, this CPU, and `out`."""
    book = nbformat.read(notebook, as_version=4)
    (cell,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source += f'\ndevice, size, out = "cpu", "tiny", {str(out)!r}'
    nbformat.write(book, folder / notebook.name)
    return folder / notebook.name


@contextmanager
def server(folder: Path):
    """JupyterLab on `folder`, on a free port with a token; yields (url, token), and ends with all its kernels."""
    import psutil

    private = {name: str(folder / ".jupyter" / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    settings = folder / ".jupyter" / "settings"
    for name, values in SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    token = secrets.token_hex(16)
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "MPLBACKEND")}
    env |= {f"JUPYTER_{name}_DIR": path for name, path in private.items()}
    env |= {"JUPYTER_TOKEN": token, "JUPYTERLAB_SETTINGS_DIR": str(settings), "PYTHONPATH": str(ROOT)}
    env |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / ".jupyter" / "workspaces"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}"]
    libc = ctypes.CDLL(None)
    with open(folder / ".jupyter" / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),  # it ends with us, even where we are killed
        )
    kernels = []
    try:
        yield _url(process, Path(private["RUNTIME"]), folder / ".jupyter" / "log"), token
    finally:
        if process.poll() is None:
            kernels = psutil.Process(process.pid).children(recursive=True)
            process.terminate()  # it ends its kernels first
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _, left = psutil.wait_procs(kernels, timeout=10)
        for kernel in left:
            kernel.kill()
        assert not left, f"JupyterLab left processes behind: {left}"


def _url(process, runtime: Path, log: Path) -> str:
    """Where the server listens, as soon as it does: it writes that down itself."""
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(path.read_text())["url"]
            except ValueError:  # half written
                pass
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


class Lab:
    """A notebook in a page of its own. errors: what the page threw or logged as an error."""

    def __init__(self, browser, url, token, path):
        self.page = browser.new_page(viewport={"width": 1400, "height": 1000})
        self.page.set_default_timeout(START * 1000)
        self.errors = []
        self.page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.sessions, self.token, self.path = f"{url}api/sessions", token, str(path)
        workspace = quote(self.path.removesuffix(".ipynb").replace("/", "-"))  # one opens all that it had open
        self.page.goto(f"{url}lab/workspaces/{workspace}/tree/{quote(self.path)}?token={token}")

    def connect(self):
        """Waits until the notebook has a kernel, which the page is connected to: before that it looks idle, and running
        its cells would only clear them."""
        end = time.monotonic() + START
        while time.monotonic() < end:
            sessions = self.page.request.get(f"{self.sessions}?token={self.token}").json()
            kernels = [session["kernel"] for session in sessions if session["path"] == self.path]
            if any(kernel["execution_state"] == "idle" and kernel["connections"] for kernel in kernels):
                return self.idle()
            self.page.wait_for_timeout(200)
        raise TimeoutError(f"{self.path}: no idle kernel after {START} s")

    def idle(self):
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']")

    def run_all(self):
        """Run > Run All Cells, until every cell has a number or something is on stderr."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.locator("li[data-command='runmenu:run-all']").click()
        self.page.wait_for_function(
            """error => {
                const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent);
                const done = prompts.length && prompts.every(text => /\\d/.test(text));
                return done || document.querySelector(error);
            }""",
            arg=ERROR,
            timeout=RUN * 1000,
        )
        self.idle()

    def failures(self) -> list[str]:
        """Tracebacks, warnings, and whatever else a cell has written to stderr."""
        return self.page.locator(ERROR).all_inner_texts()

    def pictures(self) -> int:
        """Images in outputs that a person sees: loaded, and of some size."""
        self.page.wait_for_function("[...document.querySelectorAll('.jp-OutputArea img')].every(i => i.complete)")
        seen = "images => images.filter(i => i.naturalWidth > 100 && i.offsetWidth > 100).length"
        return self.page.locator(".jp-OutputArea img").evaluate_all(seen)

    def tables(self) -> int:
        """Tables in outputs with a head and a row at least."""
        return self.page.locator(".jp-OutputArea table:has(th):has(td)").count()

    def explorers(self) -> int:
        """Pictures of the tour under controls."""
        return self.page.locator(".jp-OutputArea .widget-image").count()

    def picture(self, i: int, other_than="") -> str:
        """The pixels of the tour's picture i, as text, once they differ from the given ones."""
        read = """([i, other]) => {
            const image = document.querySelectorAll('.jp-OutputArea .widget-image')[i];
            if (!image.complete || !image.naturalWidth) return '';
            const canvas = document.createElement('canvas');
            [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
            canvas.getContext('2d').drawImage(image, 0, 0);
            const pixels = canvas.toDataURL();
            return pixels === other ? '' : pixels;
        }"""
        return self.page.wait_for_function(read, arg=[i, other_than]).json_value()

    def move(self, i: int, name: str, steps=1):
        """Steps to the right with the slider of this name above picture i."""
        sliders = self.page.locator(".jp-OutputArea .widget-slider").filter(has_text=name)
        for _ in range(steps):
            sliders.nth(i).locator(".noUi-handle").press("ArrowRight")

    def close(self):
        """Ends the kernel, and then the page."""
        for session in self.page.request.get(f"{self.sessions}?token={self.token}").json():
            self.page.request.delete(f"{self.sessions}/{session['id']}?token={self.token}")
        self.page.close()

    def shoot(self, name: str) -> Path:
        """A picture of the whole notebook, runs/browser/<name>.png; of what is on the screen, where there is none."""
        top = "document.querySelectorAll('.jp-WindowedPanel-outer').forEach(panel => panel.scrollTo(0, 0))"
        SHOTS.mkdir(parents=True, exist_ok=True)
        height = self.page.evaluate("document.querySelector('.jp-WindowedPanel-outer')?.scrollHeight ?? 0")
        self.page.set_viewport_size({"width": 1400, "height": min(max(1000, height + 150), 16000)})
        self.page.evaluate(top)
        self.page.wait_for_timeout(500)  # laid out anew
        self.page.screenshot(path=SHOTS / f"{name}.png")
        return SHOTS / f"{name}.png"
