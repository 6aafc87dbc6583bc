"""Every notebook executed as users execute it, at tiny sizes, on the CPU; then its rows and figures are looked into."""

import re
from pathlib import Path

import pytest

pm = pytest.importorskip("papermill")
nbformat = pytest.importorskip("nbformat")

from vitkit.lab.results import code_hash  # noqa: E402
from vitkit.lab.rows import COLUMNS, read_rows  # noqa: E402
from vitkit.lab.tables import is_correct  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
TOUR = next(path for path in NOTEBOOKS if path.stem == "0_tour")  # measures nothing
MEASURED = [path for path in NOTEBOOKS if path != TOUR]
THEIRS = ("transformers", "copy")
FORWARDS = ("plan", "plan+rotary", "+embed", "accelerate")
PLANS = ("auto", "size_cache", "size_cache_numpy", "size_cache_cold")
EXPECTED = {  # implementations of every op, figures, tables
    "1_fused_qk_rotary": ({"apply_rotary_qk": {"eager", "numba", "numba_in_place", "numba_from_pos", *THEIRS}}, 4, 3),
    "2_rot_pos_ids": ({"rot_pos_ids": {"reference", "torch", "numba", *THEIRS}}, 2, 2),
    "3_window_index": ({op: {"reference", "torch", "numba", *THEIRS} for op in ("window_index", "cu_seqlens")}, 5, 2),
    "4_host_device_traffic": ({"VisionPlan.from_grid": {"reference", "torch", "numba", *PLANS, *THEIRS}}, 3, 3),
    "5_vit_forward": ({"accelerate": {"transformers", *FORWARDS}, "matmul": {"matmul"}}, 3, 4),
    "6_encoder_data_parallel": ({"encode": {"one_process", "frames", "whole_images", "whole_images_padded"}}, 4, 3),
}


def test_a_tiny_run_stays_out_of_the_repositorys_results():
    from vitkit.lab import cases, results, runner

    assert cases.out_folder("", "tiny") == str(results.repo_root() / "runs" / "tiny")
    assert cases.out_folder("", "cpu") == "" and cases.out_folder("mine", "tiny") == "mine"
    target = runner.Target(MEASURED[0], {"device": "cpu", "size": "tiny"}, results.repo_root())
    assert target.csv.is_relative_to(results.repo_root() / "runs" / "tiny")


def execute(notebook, out, monkeypatch, **parameters):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a user's kernel has no interpreter switched on
    target = out / "executed.ipynb"
    parameters = {"device": "cpu", "size": "tiny", "out": str(out), **parameters}
    pm.execute_notebook(str(notebook), str(target), parameters=parameters, cwd=str(notebook.parent), progress_bar=False)
    return nbformat.read(target, as_version=4)


def silent(executed) -> list[str]:
    """The cells that show nothing though they come after the imports and do more than to prepare the next cell."""
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    first = next(i for i, cell in enumerate(code) if cell.source.startswith("run = "))
    prepares = re.compile(r"rows = run\.frame|last = workload")
    return [cell.source for cell in code[first:] if not cell.outputs and not prepares.match(cell.source)]


@pytest.mark.parametrize("notebook", MEASURED, ids=lambda path: path.stem)
def test_a_notebook_writes_its_rows_and_figures(notebook, tmp_path, monkeypatch):
    own = {"grids": [[1, 4, 6]]} if notebook.stem.startswith("4_") else {}
    executed = execute(notebook, tmp_path, monkeypatch, **own)
    ops, n_figures, n_tables = EXPECTED[notebook.stem]
    (csv,) = tmp_path.glob(f"data/results/cpu-*/{notebook.stem}.csv")
    rows = read_rows(csv)
    assert list(rows.columns) == COLUMNS
    for op, impls in ops.items():
        assert impls <= set(rows[rows.op == op].impl)
        same = ["direction", "dtype", "params", "clock", "case"]  # one row an implementation and case
        assert not rows[rows.op == op].duplicated([*same, "impl"]).any()
    assert is_correct(rows).all() and (rows.error == "").all()
    assert (
        (rows.median_us > 0).all() and (rows.p20_us <= rows.median_us).all() and (rows.median_us <= rows.p80_us).all()
    )
    assert (rows.n >= 2).all() and rows.first_call_us.notna().all() and rows.params.str.contains("threads").all()
    assert set(rows.code_hash) == {code_hash(notebook.stem)} and rows.run_id.nunique() == 1
    assert (tmp_path / "data" / "env" / f"{rows.env_id[0]}.json").is_file()

    svgs = sorted(tmp_path.glob(f"figures/cpu-*/{notebook.stem}-*.svg"))
    assert len(svgs) == n_figures and all(path.with_suffix(".png").is_file() for path in svgs)
    assert len(list(tmp_path.glob(f"figures/cpu-*/{notebook.stem}-*.md"))) == n_tables
    for path in svgs:  # matplotlib keeps the texts of an SVG as comments beside their outlines
        texts = re.findall(r"<!-- (.+?) -->", path.read_text(encoding="utf-8"))
        op = next((op for op in ops if op.replace("_", "-") in path.stem), next(iter(ops)))
        if path.stem.endswith("-latency"):
            assert "latency (µs), e2e clock" in texts and any(t.startswith(("tokens", "patches")) for t in texts)
            drawn = set(rows[rows.op == op].impl)
            assert all(texts.count(impl) == 1 for impl in drawn - {"copy"}) and texts.count("copy (limit)") == 1
            assert any(rows.run_id[0] in text for text in texts)
        elif path.stem.endswith("-speedup"):
            assert "speedup over transformers (times), e2e clock" in texts
            assert ("given" in texts) == bool(own)
    shown = [o for c in executed.cells if c.cell_type == "code" for o in c.outputs if "image/png" in o.get("data", {})]
    assert len(shown) == n_figures  # each once, in the notebook too
    assert silent(executed) == []
    said = "".join(o.get("text", "") for c in executed.cells if c.cell_type == "code" for o in c.outputs)
    assert f"wrote {csv.resolve()}" in said


def test_the_tour_shows_and_writes_its_pictures(tmp_path, monkeypatch):
    executed = execute(TOUR, tmp_path, monkeypatch, t=2, h=8, w=12, patch=150)
    outputs = [o for c in executed.cells if c.cell_type == "code" for o in c.outputs]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 5  # beside the widgets, for pages without them
    written = {path.name for path in tmp_path.glob("figures/cpu-*/*")}
    names = ("patches", "order", "sequence", "positions", "segments")
    assert written == {f"0_tour-{name}.{kind}" for name in names for kind in ("svg", "png")}
    said = "".join(o.get("text", "") for o in outputs)
    assert said.count("wrote ") == 11 and not list(tmp_path.glob("data/results/*/*.csv"))
    linked = set(re.findall(r"\]\(([^)]+\.ipynb)\)", "".join(c.source for c in executed.cells)))
    assert linked == {path.name for path in MEASURED}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_in_small_cells(notebook):
    book = nbformat.read(notebook, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert [cell.metadata.get("tags") for cell in code].count(["parameters"]) == 1
    assert all(len(cell.source.splitlines()) <= 14 for cell in code)
    assert not any(re.search(r"^\s*(def|class) |triton.jit", cell.source, re.M) for cell in code)
    for name, parameter in pm.inspect_notebook(str(notebook)).items():
        assert parameter["inferred_type_name"] not in ("None", "") and parameter["help"], name


def test_own_grids_from_a_file(tmp_path, monkeypatch):
    trace = tmp_path / "trace.csv"
    trace.write_text("t,h,w\n1,4,6\n2,8,10\n")
    execute(MEASURED[1], tmp_path, monkeypatch, grids=str(trace))
    (csv,) = tmp_path.glob("data/results/cpu-*/2_rot_pos_ids.csv")
    assert {"own line 2", "own line 3"} <= set(read_rows(csv).case)


def test_a_bad_grid_stops_the_notebook_before_a_row_is_written(tmp_path, monkeypatch):
    with pytest.raises(pm.PapermillExecutionError, match="multiples of spatial_merge_size"):
        execute(MEASURED[1], tmp_path, monkeypatch, grids=[[1, 7, 8]])
    assert not list(tmp_path.glob("data/results/*/*.csv"))


def test_the_rotary_in_two_parts_of_one_run(tmp_path, monkeypatch):
    notebook = next(path for path in NOTEBOOKS if path.stem.startswith("1_"))
    execute(notebook, tmp_path, monkeypatch, part="backward")
    (csv,) = tmp_path.glob("data/results/cpu-*/1_fused_qk_rotary.csv")
    first = read_rows(csv)
    assert set(first.direction) == {"bwd"} and not list(tmp_path.glob("figures/*/*-latency.svg"))
    execute(notebook, tmp_path, monkeypatch, part="forward", run_id=first.run_id[0])
    both = read_rows(csv)
    assert set(both.direction) == {"bwd", "fwd"} and both.run_id.nunique() == 1
    assert list(tmp_path.glob("figures/*/*-latency.svg")) and list(tmp_path.glob("figures/*/*-backward.svg"))
