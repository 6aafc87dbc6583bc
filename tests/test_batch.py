"""Batches: which runs a command line means, what is refused before any, what is gone on with."""

import json

import pytest

pytest.importorskip("papermill")
from vitkit import cli
from vitkit.lab import batch, merge, states
from vitkit.lab.batch import Job

CELL = 'device: str = "auto"\nsize: str = "auto"\nthreads: int = 0\nheads: list = [1, 2]\nscale: float = 1.0'


@pytest.fixture
def folder(toy):
    toy("1_a", parameters='device: str = "auto"\nout: str = ""')
    return toy("2_b", parameters=CELL).parent


def made(folder, *names, given=(), sweeps=(), file="", **how):
    jobs = batch.make_jobs(names, given, sweeps, str(file) if file else "", folder, **how)
    return [(job.key, job.values) for job in jobs]


def test_all_combinations_of_what_a_notebook_knows(folder):
    assert made(folder, given=[("device", "cpu")], sweeps=["threads=1,2", "scale=0.5,2"]) == [
        ("1_a", {"device": "cpu"}),  # knows neither: once
        ("2_b.1", {"device": "cpu", "threads": 1, "scale": 0.5}),
        ("2_b.2", {"device": "cpu", "threads": 1, "scale": 2.0}),
        ("2_b.3", {"device": "cpu", "threads": 2, "scale": 0.5}),
        ("2_b.4", {"device": "cpu", "threads": 2, "scale": 2.0}),
    ]
    assert made(folder, "2", sweeps=["heads=[1, 2],[3]"]) == [("2_b.1", {"heads": [1, 2]}), ("2_b.2", {"heads": [3]})]
    assert made(folder, "2", sweeps=["threads=1,1"]) == [("2_b", {"threads": 1})]


def test_a_file_of_values(folder, tmp_path):
    one, many = tmp_path / "one.yaml", tmp_path / "many.yaml"
    one.write_text("threads: 2\nscale: 1\nheads: [4]\n")
    assert made(folder, "2", file=one) == [("2_b", {"threads": 2, "scale": 1.0, "heads": [4]})]
    assert made(folder, "2", file=one, given=[("threads", "1")], sweeps=["scale=2"]) == [
        ("2_b", {"threads": 1, "scale": 2.0, "heads": [4]})
    ]
    many.write_text("- {size: tiny}\n- {size: cpu, threads: 1}\n")
    assert made(folder, "2", file=many) == [("2_b.1", {"size": "tiny"}), ("2_b.2", {"size": "cpu", "threads": 1})]


@pytest.mark.parametrize(
    "how, said",
    [
        ({"sweeps": ["thraeds=1,2"]}, "no parameter 'thraeds' in 1_a, 2_b; allowed: device, heads"),
        ({"sweeps": ["threads=1,two"]}, "threads='two': an integer is allowed"),
        ({"sweeps": ["threads"]}, "--sweep 'threads': name=value,value is allowed"),
        ({"sweeps": ["threads=1,,2"]}, "--sweep 'threads=1,,2': name=value"),
        ({"sweeps": ["heads=[1,2"]}, "name=value,value is allowed"),
        ({"sweeps": ["threads=1", "threads=2"]}, "threads is given twice"),
        ({"sweeps": ["threads=1"], "given": [("threads", "2")]}, "threads is given twice"),
        ({"given": [("device", "cuda:99")]}, "device='cuda:99': one of auto, cpu"),
        ({"given": [("device", "gpu")], "away": True}, "device='gpu': auto, cpu, cuda or cuda:<n> is allowed"),
    ],
)
def test_refused(folder, how, said):
    with pytest.raises(ValueError) as refusal:
        made(folder, **how)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text, said",
    [
        ("thread: 2", "no parameter 'thread' in 1_a, 2_b; allowed: device, heads, out, scale, size, threads; did you"),
        ("1: 2", "no parameter '1'"),
        ("threads: two", "threads='two': an integer"),
        ("threads: true", "threads='true': an integer"),
        ("threads: 1.5", "threads='1.5': an integer"),
        ("size: no", "size=False: a text is allowed (in YAML within quotes)"),
        ("scale: 2020-01-01", "scale=datetime.date(2020, 1, 1): a number"),
        ("heads: 3", "heads='3': a list"),
        ("- threads", "a mapping of names to values, or a list of such mappings, is allowed"),
        ("", "a mapping of names to values"),
        ("a: [", "no YAML"),
        (None, "No such file"),
    ],
)
def test_a_refused_file(folder, tmp_path, text, said):
    path = tmp_path / "values.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as refusal:
        made(folder, file=path)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_device_elsewhere_is_not_looked_for_here(folder):
    assert made(folder, "1", given=[("device", "cuda:3")], away=True) == [("1_a", {"device": "cuda:3"})]


def test_a_notebook_without_a_parameters_cell(toy):
    path = toy("1_a")
    book = json.loads(path.read_text())
    book["cells"][0]["metadata"] = {}
    path.write_text(json.dumps(book))
    with pytest.raises(ValueError, match=r"^1_a\.ipynb has no cell tagged parameters: [^\n]*$"):
        made(path.parent)


@pytest.fixture
def at(folder, tmp_path, monkeypatch):
    """The command line in a checkout with the toys, with a runner that only writes down what it gets."""
    got = []
    monkeypatch.setattr("vitkit.lab.results.repo_root", lambda: tmp_path)
    monkeypatch.setattr("vitkit.lab.runner.run", lambda jobs, root, **how: got.append((jobs, how)) or 0)

    def status(*argv):
        try:
            return cli.main(["run", *argv])
        except SystemExit as stop:
            return stop.code

    return status, got


def test_a_dry_run_says_what_would_run_and_writes_nothing(at, tmp_path, capsys):
    status, got = at
    assert status("--dry-run", "2", "--sweep", "threads=1,2", "-p", "device", "cpu") == 0
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] 2_b.1  device=cpu threads=1",
        "[2/2] 2_b.2  device=cpu threads=2",
    ]
    assert not got and sorted(path.name for path in tmp_path.iterdir()) == ["notebooks"]


def test_options_reach_the_runner(at):
    status, got = at
    assert status("1", "--stop", "--scheduler", "tcp://there:1", "-p", "device", "cuda") == 0
    (jobs, how), *_ = got
    assert how == {"stop": True, "scheduler": "tcp://there:1", "earlier": None}
    assert jobs == [Job("1_a", jobs[0].path, {"device": "cuda"})]
    assert status("--stop", "--keep-going") == 2 and len(got) == 1


def test_resume_takes_what_is_missing(at, folder, tmp_path, capsys):
    status, got = at
    (tmp_path / "runs").mkdir()
    jobs = batch.make_jobs([], [("device", "cpu")], ["threads=1,2"], "", folder)
    at_first, state = states.new_run(tmp_path / "runs", jobs)
    state["finished"]["2_b.1"] = {"rows": 1, "csv": "x.csv"}
    states.note(at_first, state, status="interrupted", running="2_b.2")
    assert status("--resume") == 0 and status("--resume", state["utc"]) == 0
    for missing, how in got:
        assert missing == [jobs[0], jobs[2]] and how["earlier"] == (at_first, state)
    assert status("--resume", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == ["[1/2] 1_a    device=cpu", "[2/2] 2_b.2  device=cpu threads=2"]
    assert status("--resume", "2020") == 2
    assert f"no run '2020' in runs/; there are: {state['utc']}" in capsys.readouterr().err
    assert status("--resume", state["utc"], "-p", "threads", "1") == 2
    assert "--resume takes notebooks and values from the earlier batch" in capsys.readouterr().err
    (folder / "1_a.ipynb").unlink()
    assert status("--resume") == 2 and "1_a.ipynb is gone" in capsys.readouterr().err
    for key in state["planned"]:
        state["finished"][key] = {"rows": 1, "csv": "x.csv"}
    states.note(at_first, state, status="finished")
    assert status("--resume", state["utc"]) == 0 and capsys.readouterr().out == "nothing is missing\n"
    assert status("--resume") == 2 and "no run in runs/ has anything missing" in capsys.readouterr().err


HEADER = "run_id,utc,env_id,code_hash,device,case,version,metric,value,unit"


def test_rows_are_merged_once(tmp_path):
    csv = tmp_path / "data" / "1_a-counts.csv"

    def rows(*ids):
        return "".join(f"{i},u,e,h,d,c,v,m,{n},\n" for i in ids for n in (1, 2))

    for incoming in (rows("a"), rows("b"), rows("a", "b"), rows("c") + "d,torn"):
        merge.add_runs(csv, f"{HEADER}\n{incoming}".encode())
    assert csv.read_text() == f"{HEADER}\n{rows('a', 'b', 'c')}"
    assert list(csv.parent.iterdir()) == [csv]
    csv.write_text(f"{HEADER}\n{rows('a')}x,torn by a crash")
    assert merge.add_runs(csv, f"{HEADER}\n{rows('e')}".encode()) == {"e"}
    assert csv.read_text() == f"{HEADER}\n{rows('a')}x,torn by a crash\n{rows('e')}"
    before = csv.read_bytes()
    with pytest.raises(ValueError, match="another layout"):
        merge.add_runs(csv, b"other,header\n1,2\n")
    assert csv.read_bytes() == before
