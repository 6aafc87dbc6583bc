"""The writeup: its tables are the CSV's, recomputed here by other means; nothing is hidden; its links resolve."""

import csv
import json
import re
import shutil
from statistics import geometric_mean

import pytest
from results_files import add_counts, add_rows

from vitkit.cli import main
from vitkit.lab import results, runs
from vitkit.lab.workloads import read_grids
from vitkit.lab.writeup import write
from vitkit.lab.writeup_styles import STYLES

ROOT = results.repo_root()
DEVICES = sorted(path.name for path in (ROOT / "data" / "results").iterdir())
HEADINGS = {
    "plain": ["Environment", "Results", "Accuracy", "Traffic", "Figures"],
    "vllm": ["Purpose", "Test Plan", "Test Result"],
    "sglang": ["Motivation", "Modifications", "Accuracy Tests", "Benchmarking and Profiling", "Checklist"]
    + ["Review Process"],
    "transformers": ["Before submitting", "Who can review?"],
}


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def text(device):
    return write("plain", device=device)


def csv_rows(device, notebook, kind=""):
    """The newest run's lines of a CSV file, as text."""
    path = ROOT / "data" / "results" / device / f"{notebook}{kind}.csv"
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    newest = max((row["utc"], row["run_id"]) for row in rows)[1]
    return [row for row in rows if row["run_id"] == newest]


def notebooks(device):
    stems = (path.stem for path in (ROOT / "data" / "results" / device).glob("*.csv"))
    return sorted(stem for stem in stems if not stem.endswith("-counts"))


def tables(text):
    """Every Markdown table of a text: (the lines above it, a list of dicts)."""
    out, lines = [], text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("| ---"):
            names = cells(lines[i - 1])
            body = []
            for below in lines[i + 1 :]:
                if not below.startswith("|"):
                    break
                body.append(dict(zip(names, cells(below))))
            out.append(("\n".join(lines[max(0, i - 14) : i - 1]), body))
    return out


def cells(line):
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def shown(value):
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def section(text, op):
    return text[text.index(f"### `{op}`:") :].split("\n###")[0].split("\n## ")[0]


SERIES = ("direction", "clock", "dtype", "D", "threads", "ranks")


def test_workloads_are_those_of_the_csv(device, text):
    for notebook in notebooks(device):
        rows = [r for r in csv_rows(device, notebook) if "section" not in json.loads(r["params"] or "{}")]
        for op in dict.fromkeys(row["op"] for row in rows if row["op"] != "matmul"):
            mine = section(text, op)
            before, after = re.findall(r"`([^`]+)`", mine.splitlines()[0])[1:]
            summed, table = [body for _, body in tables(mine)][:2]
            speedups = {}
            for line in table:
                times = {}
                for row in (row for row in rows if row["op"] == op and row["case"] == line["case"]):
                    given = json.loads(row["params"])
                    there = row | {name: str(given.get(name, 0)) for name in ("D", "threads", "ranks")}
                    same = all(line.get(name, there[name]) == there[name] for name in SERIES)
                    if same and row["correct"] == "true" and not row["error"]:
                        times[row["impl"]] = float(row["median_us"])
                old, new = times.get(before), times.get(after)
                for name, us in (("before µs", old), ("after µs", new)):
                    assert line[name] == (shown(us) if us else line[name]) and (us or line[name] in ("", "failed"))
                assert line["speedup"] == (shown(old / new) if old and new else "")
                rival = times.get(line["fastest other"])
                assert line["over it"] == (shown(rival / new) if rival and new else "")
                series = tuple(line[n] for n in SERIES if n in line)
                speedups.setdefault(series, []).extend([old / new] if old and new else [])
            keys = ("case", "grid_thw", "params", "direction", "clock", "dtype", "cache")
            assert len(table) == len({tuple(r[k] for k in keys) for r in rows if r["op"] == op})
            assert [line["geometric mean"] for line in summed] == [
                shown(geometric_mean(g)) if g else "" for g in speedups.values()
            ]
            assert [int(line["slower than before"]) for line in summed] == [
                sum(s < 1 for s in g) for g in speedups.values()
            ]


def test_kernels_counts_and_errors_are_those_of_the_csv(device, text):
    seen = 0
    for notebook in notebooks(device):
        published = [r for r in csv_rows(device, notebook) if '"section":"published"' in r["params"]]
        if published:
            table = next(body for above, body in tables(text) if "Kernels at the published shape" in above)
            assert {line["kernel"] for line in table} == {row["impl"] for row in published}
            for row in published:
                line = next(line for line in table if line["kernel"] == row["impl"])
                for name, column in (("median, ms", "median_us"), ("p20", "p20_us"), ("p80", "p80_us")):
                    assert line[name] == shown(float(row[column]) / 1000)
                seen += 1
        if not (ROOT / "data" / "results" / device / f"{notebook}-counts.csv").exists():
            continue
        for row in csv_rows(device, notebook, "-counts"):
            if not row["value"]:
                continue
            value = float(row["value"])
            if row["metric"] == "relative error":
                table = next(b for above, b in tables(text) if f"{notebook}: relative errors" in above)
                assert next(line for line in table if line["case"] == row["case"])[row["version"]] == shown(value)
            elif (
                row["metric"] not in (results.SHARE, "largest difference of the outputs")
                and "layer" not in row["metric"]
            ):
                table = next(b for above, b in tables(text) if f"{notebook}: every count" in above)
                line = next(x for x in table if (x["case"], x["version"]) == (row["case"], row["version"]))
                assert line[row["metric"]] == (str(int(value)) if value % 1 == 0 else shown(value))
            seen += 1
    assert seen


@pytest.mark.parametrize("style", STYLES)
def test_styles(style, device, text):
    written = write(style, device=device)
    headings = re.findall(r"^## (.*)$", written, re.M)
    assert [h for h in headings if h in HEADINGS[style]] == HEADINGS[style]
    assert not re.search(r"\[[xX]\]", written) and "{" not in re.sub(r"```.*?```", "", written, flags=re.S)
    assert [body for _, body in sorted(tables(written), key=str)] and len(written) < 65536  # a pull request holds that
    assert sorted(str(b) for _, b in tables(written)) == sorted(str(b) for _, b in tables(text))
    links = re.findall(r"\]\(([^)]+)\)", written)
    assert links and all((ROOT / link).is_file() for link in links)
    if style == "transformers":
        assert written.startswith("# What does this PR do?\n")
    newest = runs.newest_of(runs.finished(ROOT), device)
    for one in newest:
        assert f"| {one.run_id} | {len(one.rows)} |" in written and f"--run {one.run_id}" in written
        assert "not of this checkout" in written or one.is_current
        assert all(line in written for line in one.failed())
    assert json.dumps(json.loads((ROOT / "data" / "env" / f"{newest[0].env_ids[0]}.json").read_text()), indent=2,
                      sort_keys=True) in written  # fmt: skip


def toy(root):
    add_rows(
        root,
        [
            {"impl": "transformers", "median_us": 100.0},
            {"impl": "triton", "median_us": 50.0},
            {"impl": "transformers", "median_us": 100.0, "case": "big", "n_tokens": 640},
            {"impl": "triton", "median_us": 125.0, "case": "big", "n_tokens": 640},
            {"impl": "transformers", "median_us": 100.0, "case": "red", "n_tokens": 6400},
            {"impl": "triton", "correct": False, "note": "another value", "case": "red", "n_tokens": 6400},
            {"impl": "liger", "correct": None, "error": "ImportError: no liger", "case": "red", "n_tokens": 6400},
        ],
    )
    add_counts(root, [("a", "triton", results.SHARE, 1.5), ("a", "triton", "relative error", 1e-3)])


def test_what_is_slow_or_red_is_said(tmp_path):
    toy(tmp_path)
    text = write(root=tmp_path)
    assert "**Toy GPU** (1 GiB, driver 1.2, CUDA 13.0); Toy CPU (2 cores, 2 GiB); Linux x86_64" in text
    assert "**2_toy: measured with other code than that of this checkout.**" in text
    assert "**Slower than before:** big (0.8)." in text
    table = next(body for _, body in tables(text) if body and "before µs" in body[0])
    assert [line["after µs"] for line in table] == ["50", "125", "failed"]
    assert [line["speedup"] for line in table] == ["2", "0.8", ""]
    summed = next(body for _, body in tables(text) if body and "geometric mean" in body[0])
    assert (summed[0]["workloads"], summed[0]["with a speedup"], summed[0]["geometric mean"]) == ("3", "2", "1.265")
    assert "- 2_toy (rot_pos_ids, triton, fwd, int32, red, e2e): another value" in text
    assert "- 2_toy a peer, (rot_pos_ids, liger, fwd, int32, red, e2e): ImportError: no liger" in text
    assert "- 2_toy (triton, a): 1.5 of the error allowed" in text
    assert "5 of 7 rows passed" in text and "python -m vitkit run 2_toy -p device cuda -p out ROOT\n" in text


def test_one_rank_is_set_against_one_process(tmp_path):
    """And a check whose error was not kept says that it passed, not that the error was 0."""
    ways = [{"op": "encode", "impl": impl, "median_us": us} for impl, us in (("frames", 50), ("one_process", 40))]
    add_rows(tmp_path, ways)
    add_counts(tmp_path, [("a", "frames, 2 on the CPU", results.SHARE, 0, "1")])
    text = write(root=tmp_path)
    assert "### `encode`: `one_process` before, `frames` after" in text and "(0.8)" in text
    assert "| frames, 2 on the CPU | 1 | passed |" in text and "relative errors" not in text


def test_own_grids_are_named_by_their_shape_and_can_be_measured_again(tmp_path):
    own = {"own line 2": [[1, 76, 136]], "tower, own batch b": [[1, 4, 4]] * 4, "1x8x8": [[1, 8, 8]]}
    for case, grid in own.items():
        for impl in ("transformers", "triton"):
            add_rows(tmp_path, [{"case": case, "grid_thw": grid, "impl": impl, "median_us": 5}])
    text = write(root=tmp_path)
    cases = [line["case"] for _, body in tables(text) for line in body if "before µs" in line]
    assert sorted(cases) == ["1x8x8", "own line 2: 1x76x136", "tower, own batch b: 1x4x4, 1x4x4, 1x4x4 and 1 more"]
    file = tmp_path / "grids1.jsonl"
    file.write_text(re.search(r"cat > grids1.jsonl <<'EOF'\n(.*?)EOF\n", text, re.DOTALL)[1])
    assert [grid for _, grid in read_grids(str(file))] == [[[1, 76, 136]], [[1, 4, 4]] * 4]
    assert "vitkit run 2_toy -p device cuda -p grids grids1.jsonl -p out ROOT\n" in text


@pytest.mark.parametrize("place, given", [("mine", "-p out mine"), ("runs/tiny", "-p size tiny")])
def test_a_root_within_the_repository_can_be_repeated_as_printed(place, given, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "published.json", tmp_path / "data")
    monkeypatch.setattr(results, "repo_root", lambda: tmp_path)
    toy(tmp_path / place)
    text = write(root=tmp_path / place)
    assert f"vitkit run 2_toy -p device cuda {given}\n" in text and f" --root {place}\n" in text


def test_only_red_rows(tmp_path):
    add_rows(tmp_path, [{"impl": "transformers", "correct": False}, {"impl": "triton", "correct": False}])
    text = write(root=tmp_path)
    assert text.count("wrong, or without a time") == 2 and "| failed | failed |" in text


def test_the_newest_run_or_the_one_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "code_hash", lambda notebook: "e" * 64)
    new = {"run_id": "r2", "utc": "2026-02-01T00:00:00Z"}
    add_rows(tmp_path, [{"impl": "transformers", "median_us": 30.0}, {"median_us": 10.0}])
    add_rows(tmp_path, [{"impl": "transformers", "median_us": 40.0, "code_hash": "e" * 64}], **new)
    add_rows(tmp_path, [{"median_us": 10.0, "code_hash": "e" * 64}], **new)
    add_rows(tmp_path, [{"median_us": 5.0}], utc="2025-01-01T00:00:00Z", device="cpu-toy", run_id="r0")
    figure = tmp_path / "figures" / "nvidia-toy" / "2_toy-latency.png"
    figure.parent.mkdir(parents=True)
    figure.touch()
    newest, older = write(root=tmp_path), write(root=tmp_path, run_ids=["r1"])
    assert "| 40 | 10 | 4 |" in newest and "as in this checkout" in newest and "other code" not in newest
    assert "(figures/nvidia-toy/2_toy-latency.png)" in newest
    assert "| 30 | 10 | 3 |" in older and "not of this checkout" in older and "2_toy-latency" not in older
    assert "(../figures/nvidia-toy/2_toy-latency.png)" in write(root=tmp_path, out=tmp_path / "docs" / "a.md")
    assert "(https://x.org/b/figures/nvidia-toy/2_toy-latency.png)" in write(root=tmp_path, base="https://x.org/b/")
    assert "-p device cpu" in write(root=tmp_path, device="cpu-toy")
    (tmp_path / "data" / "env" / "0123456789ab.json").unlink()
    assert "data/env/0123456789ab.json is missing" in write(root=tmp_path)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--style", "slang"], "style='slang': one of plain, vllm, sglang, transformers is allowed"),
        (["--device", "tpu"], "device='tpu': one of nvidia-toy is allowed"),
        (["--run", "r9"], "run='r9': one of r1 (2_toy, nvidia-toy) is allowed"),
        (["--out", "data"], "cannot write it (Is a directory)"),
        (["--out", "nowhere/a.md"], "cannot write it (No such file or directory)"),
        (["--root", "nowhere"], "no results in"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, argv, said):
    toy(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["writeup", "--root", ".", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("vitkit writeup: ") and said in err and err.count("\n") == 1 and not out
    assert sorted(tmp_path.rglob("*")) == before and not list(tmp_path.parent.glob("*.part"))


def test_to_a_file_and_to_standard_output(tmp_path, monkeypatch, capsys):
    toy(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["writeup", "--root", ".", "--style", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## Purpose") and printed == write("vllm", root=tmp_path)
    assert main(["writeup", "--root", ".", "--style", "vllm", "--out", "a.md"]) == 0
    assert capsys.readouterr().out == "wrote a.md\n" and (tmp_path / "a.md").read_text() == printed
