"""The command line: one line and status 2 for what cannot be done, before a kernel starts."""

import re
from types import SimpleNamespace

import pytest
import torch

from vitkit.cli import main


@pytest.fixture
def no_kernel(toy, tmp_path, monkeypatch):
    """Two toy notebooks as the repository's, and a papermill that must not execute them."""
    papermill = pytest.importorskip("papermill")

    def execute(*args, **kwargs):
        raise AssertionError("a kernel was started")

    monkeypatch.setattr(papermill, "execute_notebook", execute)
    monkeypatch.setattr("vitkit.lab.results.repo_root", lambda: tmp_path)
    toy("1_a")
    toy("2_b", parameters='device: str = "auto"\nthreads: int = 0')
    return tmp_path


@pytest.mark.parametrize(
    "argv, said",
    [
        (
            ["-p", "devcie", "cpu"],
            "no parameter 'devcie' in 1_a, 2_b; allowed: device, size, threads; did you mean 'device'?",
        ),
        (["-p", "threads", "many", "2"], "threads='many': an integer is allowed"),
        (["1", "-p", "threads", "1"], "no parameter 'threads' in 1_a"),
        (["3_c"], "no notebook '3_c' in notebooks/; there are: 1_a, 2_b"),
        (["-p", "device", "tpu"], "device='tpu'"),
        (["-p", "device", "cuda:77"], "device='cuda:77'"),
        (["-p", "size", "huge"], "size='huge': one of auto, tiny, cpu, gpu is allowed"),
        (["-p", "size"], "expected 2 arguments"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_run_refuses(no_kernel, capsys, argv, said):
    assert status(["run", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("vitkit run: ") and said in err and err.count("\n") == 1 and not out
    assert not (no_kernel / "runs").exists()


def test_names_and_parameters_mix(no_kernel, monkeypatch):
    plans = []
    monkeypatch.setattr("vitkit.lab.runner.run", lambda jobs, root, **how: plans.append((jobs, root)) or 0)
    assert main(["run", "2", "-p", "threads", "1", "1_a", "-p", "device", "cpu"]) == 0
    assert main(["run", "-p", "device", "cpu", "2"]) == 0
    (first, root), (second, _) = plans
    assert root == no_kernel
    assert [(job.path.stem, job.values) for job in first] == [
        ("2_b", {"threads": 1, "device": "cpu"}),
        ("1_a", {"device": "cpu"}),
    ]
    assert [job.path.stem for job in second] == ["2_b"]


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "run" in out and "rotary" in out


@pytest.mark.parametrize("argv", [[], ["rn"]])
def test_unknown_command(argv, capsys):
    assert main(argv) == 2
    assert "allowed: run, writeup" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--device", "cuda:77"], "device='cuda:77'"),
        (["--head-size", "81"], "81 is odd"),
        (["--seq-len", "0"], "an integer of at least 1"),
        (["--warmup-iter", "-1"], "an integer of at least 0"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_rotary_refuses(argv, said, capsys):
    assert status(["rotary", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("vitkit rotary: ") and said in err and err.count("\n") == 1


def test_rotary_tells_every_default(capsys):
    assert status(["rotary", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "(default: 10 on a GPU, else 2)" in out and "(default: 1000 on a GPU, else 20)" in out
    assert out.count("(default: ") == 8 and "None" not in out and "SUPPRESS" not in out


@pytest.mark.parametrize("argv, counts", [([], (2, 20)), (["--warmup-iter", "0", "--benchmark-iter", "7"], (0, 7))])
def test_rotary_counts_iterations(monkeypatch, argv, counts):
    configs = []
    monkeypatch.setattr("vitkit.lab.rotary_bench.run", lambda config: configs.append(config) or 0)
    assert main(["rotary", "--device", "cpu", *argv]) == 0
    assert (configs[0].warmup_iter, configs[0].benchmark_iter) == counts


SMALL = ["--batch-size", "2", "--seq-len", "33", "--num-heads", "3", "--warmup-iter", "1", "--benchmark-iter", "3"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rotary_on_the_cpu(capsys, dtype):
    pytest.importorskip("numba")
    assert main(["rotary", "--device", "cpu", "--dtype", dtype, *SMALL]) == 0
    out = capsys.readouterr().out
    assert re.search(r"seq_len +33\n", out) and re.search(rf"dtype +{dtype}\n", out)
    for label in ("eager", "numba", "speedup over eager"):
        assert re.search(rf"^{label}.* [\d.]+x? +[\d.]+x?$", out, re.M), out


@pytest.mark.gpu
def test_rotary_on_the_gpu(capsys):
    assert main(["rotary", "--device", "cuda", *SMALL]) == 0
    out = capsys.readouterr().out
    for label in ("1c", "2c", "fusion speedup"):
        assert re.search(rf"^{label}.* [\d.]+x? +[\d.]+x?$", out, re.M), out


def test_no_time_on_a_red_check(monkeypatch):
    from vitkit.lab import rotary_bench

    def wrong(r):
        return r.q.clone(), r.k * 1.01

    monkeypatch.setattr(rotary_bench, "implementations", lambda device: {"wrong": wrong})
    monkeypatch.setattr(rotary_bench, "time_calls", lambda *args: pytest.fail("timed"))
    config = SimpleNamespace(batch_size=1, seq_len=8, num_heads=2, head_size=8, dtype="float32", warmup_iter=0)
    config.device, config.benchmark_iter = torch.device("cpu"), 1
    said = []
    assert rotary_bench.run(config, say=said.append) == 1
    assert "wrong: NOT correct" in said[-1]


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "--nproc"),
        (["--nproc", "0"], "'0': an integer of at least 1 is allowed"),
        (["--nproc", "2", "--threads", "x"], "'x': an integer of at least 0 is allowed"),
        (["--nproc", "2", "--tower", "clip"], "invalid choice: 'clip'"),
        (["--nproc", "99", "--device", "cuda"], "allowed here"),
    ],
)
def test_parallel_refuses(argv, said, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("started"))
    assert status(["parallel", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("vitkit parallel: ") and said in err and err.count("\n") == 1


def status(argv) -> int:
    """The exit status, whether returned or raised."""
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code
