"""Order, gates and labels of the measurement. No test asserts a time: only what is timed, how often and when not."""

import gc

import pytest
import torch

from vitkit.lab import graphs, limits, timing
from vitkit.lab.graphs import input_sets
from vitkit.lab.limits import CopyLimit, EmptyLaunch
from vitkit.lab.timing import Case, measure

TIMES = ["n", "median_us", "p20_us", "p80_us", "first_call_us", "bytes", "gbps"]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def example(calls, **options):
    options = {
        "inputs": [(torch.arange(4.0),)],
        "check": lambda impl, out, inputs: torch.equal(out, inputs[0] * 2),
    } | options
    return Case(op="double", case="four", calls=calls, **options)


def test_rounds_are_interleaved_in_shuffled_but_fixed_order():
    def order():
        seen = []

        def call(name):
            return lambda x: seen.append((name, gc.isenabled())) or x * 2

        rows = measure(example({name: call(name) for name in "abc"}), "e2e", device="cpu", n=20)
        assert [row["n"] for row in rows] == [20] * 3 and [row["impl"] for row in rows] == list("abc")
        return seen

    seen = order()
    assert len(seen) == 3 * (1 + 3 + 20) and gc.isenabled()
    assert not any(collecting for _, collecting in seen[3:])
    rounds = ["".join(name for name, _ in seen[i : i + 3]) for i in range(12, len(seen), 3)]
    assert all(sorted(done) == list("abc") for done in rounds) and len(set(rounds)) > 2
    assert order() == seen


def test_a_row_has_what_was_measured_and_of_what():
    saved = []
    case = example(
        {"mul": lambda x: x * 2}, grid_thw=[[1, 2, 2]], params={"B": 1}, dtype="float32", n_tokens=4, bytes=32
    )
    rows = measure(case, "e2e", device="cpu", n=9, on_rows=saved.extend)
    (row,) = rows
    assert saved == rows and row["correct"] is True and row["error"] == row["note"] == ""
    assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"] and row["first_call_us"] > 0
    assert row["clock"] == "e2e" and row["cache"] == "warm" and row["direction"] == "fwd" and row["bytes"] == 32
    assert row["gbps"] == pytest.approx(32 / row["median_us"] / 1e3, abs=1e-3)
    assert row["grid_thw"] == [[1, 2, 2]] and row["params"] == {"B": 1} and row["n_tokens"] == 4
    assert set(row) <= set(__import__("vitkit.lab.rows", fromlist=["COLUMNS"]).COLUMNS)
    assert "gbps" not in measure(example({"mul": lambda x: x * 2}), "e2e", device="cpu", n=1)[0]


def test_what_is_red_or_raises_is_called_once_and_never_timed():
    called = {"red": 0, "ill": 0}

    def red(x):
        called["red"] += 1
        return x * 3

    def ill(x):
        called["ill"] += 1
        raise TypeError("no\n" + "x" * 500)

    def check(impl, out, inputs):
        wrong = int((out != inputs[0] * 2).sum())
        return wrong == 0, f"{wrong} differ" if wrong else ""

    rows = measure(example({"red": red, "ill": ill, "good": lambda x: x * 2}, check=check), "e2e", device="cpu", n=4)
    red_row, ill_row, good = rows
    assert called == {"red": 1, "ill": 1} and good["n"] == 4
    assert red_row["correct"] is False and red_row["note"] == "3 differ" and red_row["error"] == ""
    assert (
        ill_row["correct"] is None and ill_row["error"].startswith("TypeError: no xxx") and len(ill_row["error"]) == 200
    )
    assert not any(row.get(name) for row in (red_row, ill_row) for name in TIMES)
    only_red = measure(example({"red": red}), "e2e", device="cpu")
    assert only_red[0]["correct"] is False and "n" not in only_red[0]


def test_a_check_that_raises_is_an_error_of_its_row():
    (row,) = measure(example({"mul": lambda x: x * 2}, check=lambda *_: 1 / 0), "e2e", device="cpu")
    assert row["correct"] is None and row["error"].startswith("ZeroDivisionError") and "n" not in row


def test_calls_in_place_are_checked_on_fresh_inputs():
    case = example(
        {"a": lambda x: x.mul_(2), "b": lambda x: x.mul_(2)},
        fresh=lambda: (torch.arange(4.0),),
        check=lambda impl, out, inputs: torch.equal(out, torch.arange(4.0) * 2),
    )
    rows = measure(case, "e2e", device="cpu", n=2)
    assert [row["correct"] for row in rows] == [True, True] and [row["n"] for row in rows] == [2, 2]


def test_the_budget_bounds_the_rounds(monkeypatch):
    case = example({"mul": lambda x: x * 2})
    assert measure(case, "e2e", device="cpu", budget_s=0, n_min=6)[0]["n"] == 6
    assert measure(case, "e2e", device="cpu", budget_s=1e9, n_max=8)[0]["n"] == 8
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))  # every warm-up round takes one second
    assert measure(case, "e2e", device="cpu", budget_s=30)[0]["n"] == 30


def test_the_cpu_has_one_clock():
    for clock in ("host", "kernel", "wall"):
        with pytest.raises(ValueError, match=f"clock='{clock}' on cpu: one of e2e is allowed"):
            measure(example({"mul": lambda x: x * 2}), clock, device="cpu")
    with pytest.raises(ValueError, match="at least one call"):
        measure(example({}), "e2e", device="cpu")


def test_copy_limit_copies_its_own_buffers_in_turn_and_checks_itself():
    copy = CopyLimit(100, 3, "cpu")
    assert copy.bytes == 96 and len({x.data_ptr() for set_ in [copy(), *copy.sources] for x in set_}) == 4
    for i in (1, 2, 0, 1):
        assert torch.equal(copy("the op's inputs")[0], copy.sources[i][0])
        assert copy.check([copy.sources[i][0].clone()]) and not copy.check([copy.sources[i][0] + 1])
    both = CopyLimit(96, 1, "cpu", parts=2)
    assert both.bytes == 96 and [x.numel() * 4 for x in both()] == [24, 24]
    (row,) = measure(example({"copy": copy}, bytes=100), "e2e", device="cpu", n=3)
    assert row["correct"] is True and row["bytes"] == 96 and row["n"] == 3
    copy.check = lambda copied: False
    assert measure(example({"copy": copy}), "e2e", device="cpu")[0]["correct"] is False
    with pytest.raises(ValueError, match="at least 8 bytes"):
        CopyLimit(0, 1, "cpu")
    with pytest.raises(ValueError, match="only a GPU"):
        EmptyLaunch("cpu")


def test_a_large_copy_on_a_gpu_is_an_elementwise_kernel(monkeypatch):
    randint = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *args, device, **options: randint(*args, **options))
    monkeypatch.setattr(limits, "DRIVER_COPY_BYTES", 96)
    for n_bytes, inverted in ((88, False), (96, True)):
        copy = CopyLimit(n_bytes, 2, "cuda", parts=2)  # one part all the same
        (copied,) = copy()
        assert copy.bytes == n_bytes and copied.numel() * 4 == n_bytes // 2 and copy.inverted == inverted
        assert torch.equal(copied, ~copy.sources[0][0] if inverted else copy.sources[0][0])
        assert copy.check([copied]) and not copy.check([copied + 1])
    assert not CopyLimit(10_000, 1, "cpu").inverted


def test_sets_of_inputs_exceed_the_cache_within_bounds(monkeypatch):
    class Properties:
        L2_cache_size = 50 * 2**20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(torch.version, "hip", None)
    assert [len(input_sets(tuple, int(2**20 * mib), "cuda:0")) for mib in (1 / 4, 1, 10, 1000)] == [512, 201, 21, 2]
    assert len(input_sets(tuple, 1, "cpu")) == 1
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert graphs.cache_bytes("cuda:0") == 256 * 2**20  # the cache behind the L2 that ROCm reports
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert graphs.cache_bytes("cuda:0") == 64 * 2**20


def test_a_storage_counts_once():
    x = torch.zeros(10, dtype=torch.uint8)
    assert graphs._storage_bytes([(x, x[2:]), {"a": [torch.zeros(5, dtype=torch.uint8)]}, None, 3, "text"]) == 15


class TestGpu:
    pytestmark = gpu

    def make(self, size=2**20):
        return (torch.rand(size, device="cuda"),)

    @pytest.mark.parametrize("clock", ["host", "e2e", "kernel"])
    def test_every_clock(self, clock):
        inputs = input_sets(lambda: self.make(2**22), 2**25, "cuda")
        calls = {"mul": lambda x: x * 2, "add": lambda x: x + x, "copy": CopyLimit(2**25, len(inputs), "cuda")}
        pytest.importorskip("triton")
        calls["empty_launch"] = EmptyLaunch("cuda")
        case = example(calls, inputs=inputs, bytes=2**25)
        for row in measure(case, clock, device="cuda", n=5):
            assert row["correct"] is True and row["error"] == "" and row["n"] == 5 and row["clock"] == clock
            assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
            assert row["cache"] == ("cold" if clock == "kernel" else "warm")
            assert ("gbps" in row) == (row["impl"] != "empty_launch" and clock != "host")

    def test_few_small_sets_are_called_warm(self):
        inputs = [self.make(64) for _ in range(4)]
        (row,) = measure(example({"mul": lambda x: x * 2}, inputs=inputs), "kernel", device="cuda", n=5)
        assert row["cache"] == "warm" and row["n"] == 5

    def test_what_cannot_be_captured_has_no_time_and_spoils_no_other(self):
        calls = {
            "reads": lambda x: x * 2 if float(x.sum()) >= 0 else x,
            "mul": lambda x: x * 2,
            "uploads": lambda x: x * torch.full((1,), 2.0).to(x.device),
            "add": lambda x: x + x,
        }
        stream = torch.cuda.current_stream()
        rows = {row["impl"]: row for row in measure(example(calls, inputs=[self.make()]), "kernel", device="cuda", n=5)}
        assert torch.cuda.current_stream() == stream
        assert rows["reads"]["error"].startswith("not capturable: ") and "n" not in rows["reads"]
        assert rows["reads"]["correct"] is True and rows["mul"]["n"] == rows["add"]["n"] == 5
        assert rows["uploads"].get("n") or rows["uploads"]["error"].startswith("not capturable: ")
        torch.cuda.synchronize()
        again = measure(example({"mul": lambda x: x * 2}, inputs=[self.make()]), "kernel", device="cuda", n=5)
        assert again[0]["error"] == "" and again[0]["n"] == 5

    def test_the_memory_of_the_graphs_is_given_back(self):
        case = example({"mul": lambda x: x * 2}, inputs=[self.make() for _ in range(8)])
        reserved = []
        for _ in range(4):
            measure(case, "kernel", device="cuda", n=2)
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[-1] <= reserved[1], reserved


def test_the_statistics_are_those_of_the_times(monkeypatch):
    """A clock that is set by the calls: 10, 20, ... us; the median, p20 and p80 follow by hand."""
    now, calls = [0], []
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now[0])

    def call(x):
        calls.append(1)
        now[0] += 10_000 * max(0, len(calls) - 4)  # the first call and three warm-up rounds cost nothing
        return x * 2

    (row,) = measure(example({"it": call}, bytes=6000), "e2e", device="cpu", n=11)
    assert (row["n"], row["median_us"], row["p20_us"], row["p80_us"]) == (11, 60, 30, 90)
    assert row["bytes"] == 6000 and row["gbps"] == 0.1


def test_one_that_raises_later_drops_out_and_the_others_go_on():
    calls = []

    def tires(x):
        calls.append(1)
        if len(calls) > 6:
            raise MemoryError("no memory left in /home/someone/secret/file.py today")
        return x * 2

    tired, other = measure(example({"tires": tires, "other": lambda x: x * 2}), "e2e", device="cpu", n=9)
    assert tired["error"] == "MemoryError: no memory left in file.py today" and "median_us" not in tired
    assert other["n"] == 9 and not other["error"]
