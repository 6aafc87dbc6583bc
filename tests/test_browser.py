"""The notebooks as a person meets them: JupyterLab in a real browser runs every one, and the tour's controls are moved.

Skipped where there is no chromium or no playwright, unless VITKIT_BROWSER=required. A failure leaves a screenshot in
runs/browser/<notebook>-failed.png, beside those of the notebooks that ran.
"""

import os
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

nbformat = pytest.importorskip("nbformat")

from lab_page import CHROMIUM, FLAGS, ROOT, SHOTS, Lab, copy_tiny, server  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MISSING = ["chromium (Debian: apt-get install chromium)"] * (not CHROMIUM)
MISSING += [f"{name} (pip install {name})" for name in ("playwright", "jupyterlab", "psutil") if not find_spec(name)]
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
pytestmark = pytest.mark.skipif(
    bool(MISSING) and os.environ.get("VITKIT_BROWSER") != "required", reason=f"not here: {', '.join(MISSING)}"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """open(path) yields a Lab of one notebook below the server's root; a failure within leaves a screenshot."""
    assert not MISSING, f"VITKIT_BROWSER=required, but not here: {', '.join(MISSING)}"
    from playwright.sync_api import sync_playwright

    root = tmp_path_factory.mktemp("lab")
    for folder in ("notebooks", "moved"):
        (root / folder).mkdir()
    for notebook in NOTEBOOKS:
        copy_tiny(notebook, root / "notebooks", root / "out")
    copy_tiny(NOTEBOOKS[0], root / "moved", root / "out")
    cells = [nbformat.v4.new_code_cell(source) for source in ("1 / 0", "2")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), root / "red.ipynb")
    with server(root) as (url, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        @contextmanager
        def open_(path):
            (SHOTS / f"{path.stem}-failed.png").unlink(missing_ok=True)
            page = Lab(browser, url, token, path.relative_to(root))
            try:
                page.connect()
                yield page
            except BaseException:
                page.shoot(f"{path.stem}-failed")
                raise
            finally:
                page.close()

        open_.root = root
        yield open_
        browser.close()


@pytest.mark.parametrize("stem", [path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_in_the_browser(lab, stem):
    with lab(lab.root / "notebooks" / f"{stem}.ipynb") as page:
        page.run_all()
        assert page.failures() == []
        figures, tables = (list(lab.root.glob(f"out/figures/*/{stem}-*.{kind}")) for kind in ("svg", "md"))
        assert figures and page.pictures() == len(figures)
        assert bool(tables) == (stem != "0_tour")
        assert page.tables() == len(tables) + bool(tables)  # and that of the workload by hand, which writes no file
        assert page.errors == []
        page.shoot(stem)


def test_the_controls_of_the_tour_move_the_picture(lab):
    with lab(lab.root / "moved" / "0_tour.ipynb") as page:
        page.run_all()
        last = page.explorers() - 1
        seen = [page.picture(last)]
        for name in ("frames t", "rows h", "columns w", "window", "merge size", "chosen patch"):
            page.move(last, name)
            seen.append(page.picture(last, other_than=seen[-1]))
        for i in range(last):
            before = page.picture(i)
            page.move(i, "chosen patch", steps=4)  # into the next merge block
            page.picture(i, other_than=before)
        assert last == 4 and page.failures() == [] and page.errors == []
        page.shoot("0_tour-moved")


def test_an_error_of_a_cell_is_found(lab):
    with lab(lab.root / "red.ipynb") as page:
        page.run_all()
        assert "ZeroDivisionError" in "".join(page.failures()) and page.pictures() == page.tables() == 0


def test_a_failure_leaves_a_screenshot_and_no_process(lab):
    import psutil

    with pytest.raises(KeyError), lab(lab.root / "red.ipynb"):
        raise KeyError("on purpose")
    shot = SHOTS / "red-failed.png"
    assert shot.read_bytes().startswith(b"\x89PNG")
    shot.unlink()
    other = lab.root / "other"
    other.mkdir()
    before = psutil.Process().children(recursive=True)
    with pytest.raises(KeyError), server(other) as (url, token):
        assert url.startswith("http://127.0.0.1:") and len(token) == 32
        raise KeyError("on purpose")
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= {p.pid for p in before}
