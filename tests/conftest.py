"""Set before anything imports triton: without a GPU its kernels run under the interpreter."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test reads no model from the network
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The first example of a test may compile for seconds.
settings.register_profile("vitkit", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vitkit")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def toy(tmp_path):
    """toy(stem, *cells, parameters=source): writes tmp_path/notebooks/<stem>.ipynb and returns its path."""
    from nbformat import v4, write

    def make(stem, *cells, parameters='device: str = "auto"\nsize: str = "auto"'):
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # papermill needs the language
        notebook = v4.new_notebook(metadata={"kernelspec": kernel})
        notebook.cells = [v4.new_code_cell(source) for source in (parameters, *cells)]
        notebook.cells[0].metadata["tags"] = ["parameters"]
        path = tmp_path / "notebooks" / f"{stem}.ipynb"
        path.parent.mkdir(exist_ok=True)
        write(notebook, path)
        return path

    return make
