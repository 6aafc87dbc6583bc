"""What notebook 5 times is compared with float32 first, and the comparison finds what is wrong."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from vitkit import Geometry
from vitkit.lab import cases, forward_arms, forward_cases, peers, tower, traffic
from vitkit.lab.limits import Matmul
from vitkit.lab.timing import measure

CPU, GRID = torch.device("cpu"), [[2, 12, 10], [1, 18, 8]]
GEOMETRIES = {"qwen2_5_vl": Geometry.qwen2_5_vl(), "qwen2_vl": Geometry.qwen2_vl()}
VERSIONS = ["transformers", "plan", "plan+rotary", "+embed", "accelerate"]


@pytest.fixture(params=GEOMETRIES)
def arms(request):
    out = forward_cases.Arms(tower.make_tower(GEOMETRIES[request.param], CPU))
    yield out
    out.close()


@pytest.fixture
def bf16(monkeypatch):
    monkeypatch.setattr(tower, "_dtype", lambda device: torch.bfloat16)
    return forward_cases.Arms(tower.make_tower(Geometry.qwen2_5_vl(), CPU))


def forward_case(arms, grid=GRID, **options):
    return forward_cases.forward_case("two", grid, arms, threads=1, **options)


def measured(case, device=CPU):
    return measure(case, "e2e", device=device, n=1, warmup=0)


def test_every_version_is_right_and_timed(arms):
    case = forward_case(arms)
    rows = measured(case)
    assert [row["impl"] for row in rows] == VERSIONS
    assert all(row["correct"] and not row["error"] and row["median_us"] > 0 for row in rows), rows
    assert rows[0]["note"] == "error 0, allowed 1e-05"
    assert (case.case, case.op, case.dtype) == (f"{arms.name}, two", "accelerate", "float32")
    assert (case.n_tokens, case.n_images) == (384, 2)
    assert case.params == {"tower": arms.name, "layers": 2, "flop": forward_cases.flops(arms.exact, GRID), "threads": 1}


def test_the_parts_are_added_one_by_one():
    for parts in (forward_arms.GPU_PARTS, forward_arms.CPU_PARTS):
        *steps, last = parts.items()
        assert last == ("accelerate", "auto") and all(set(a) < set(b) for (_, a), (_, b) in zip(steps, steps[1:]))
    assert set(forward_arms.THEIRS) <= set(peers.PEERS) and not set(forward_arms.GPU_PARTS) & set(peers.PEERS)


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda out: out * (1 + 2e-5), "error 2"),
        (lambda out: out.index_fill(0, torch.tensor([3]), float("nan")), "error nan"),
        (lambda out: out.double(), "torch.float64"),
        (lambda out: out[:-1], "(95, 64) instead of"),
    ],
)
def test_a_wrong_output_gets_no_time(arms, spoil, said):
    case = forward_case(arms)
    good = case.calls["accelerate"]
    del case.calls["plan"], case.calls["+embed"], case.calls["plan+rotary"]
    case.calls["accelerate"] = lambda x: spoil(good(x))
    theirs, row = measured(case)
    assert row["correct"] is False and said in row["note"] and "median_us" not in row
    assert theirs["correct"] is True


def test_in_bf16_no_more_error_than_transformers_has(bf16):
    case = forward_case(bf16)
    good = case.calls["plan"]
    rows = {row["impl"]: row for row in measured(case)}
    assert all(rows[impl]["correct"] for impl in ("transformers", "plan")), rows
    error, allowed = (float(part.split()[-1]) for part in rows["transformers"]["note"].split(","))
    assert 1e-4 < error < 3e-2 and allowed == pytest.approx(1.02 * error, rel=0.01)

    def noisier(x):
        out = good(x)
        return out + error * out.std() * torch.randn(out.shape, generator=torch.manual_seed(0)).to(out.dtype)

    case.calls = {"plan": noisier}
    (row,) = measured(case)
    assert row["correct"] is False and "median_us" not in row


@pytest.mark.parametrize("stale", ["pixels of another batch", "the place of the pixels"])
def test_a_replay_is_compared_too(arms, stale):
    """A captured graph that is right at first, and later does not read what it is given."""
    case = forward_case(arms)
    good, seen = case.calls["accelerate"], []

    def replayed(x):
        seen.append(x)
        if len(seen) == 1:
            return good(x)
        return good(seen[1] if stale == "pixels of another batch" else torch.zeros_like(x))

    del case.calls["plan"], case.calls["+embed"], case.calls["plan+rotary"]
    case.calls["accelerate"] = replayed
    assert measured(case)[-1]["correct"] is False
    assert len({x.data_ptr() for x in seen}) == len(seen) == 4


def test_a_version_that_cannot_be_made_is_an_error_of_its_row_alone(arms, monkeypatch):
    one = arms.towers["transformers"]

    def fails(copy, parts):
        if "rotary" in parts:
            raise ValueError("no such part")

    monkeypatch.setattr(forward_arms, "accelerate_", fails)
    rows = measured(forward_case(forward_cases.Arms(one)))
    errors = {row["impl"]: row["error"] for row in rows}
    assert errors == dict.fromkeys(VERSIONS, "") | dict.fromkeys(VERSIONS[2:4], "ValueError: no such part")


def test_copies_share_no_weight_and_are_let_go(arms):
    modules = [*arms.towers.values(), arms.exact]
    places = [{p.data_ptr() for p in module.parameters()} for module in modules]
    assert len(set.union(*places)) == sum(map(len, places))
    assert all(torch.equal(a, b) for a, b in zip(modules[0].parameters(), modules[-1].parameters()))
    arms.close()
    assert not arms.towers and arms.exact is None


@pytest.mark.parametrize("grid", [GRID, [[1, 2, 2]], [[3, 20, 36], [1, 16, 16]]])
def test_flops_are_those_that_torch_counts(arms, grid):
    one = arms.towers["transformers"]
    one.config._attn_implementation = "eager"  # whose products are counted on every device
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        one(arms.pixels(grid), grid_thw=torch.tensor(grid))
    assert forward_cases.flops(one, grid) == counter.get_total_flops()


def test_flops_at_the_published_dimensions():
    with torch.device("meta"):
        one = tower.make_tower(Geometry.qwen2_5_vl(), "meta", **tower.PUBLISHED)
    linear = 1176 * 1280 + 32 * (4 * 1280**2 + 3 * 1280 * 3420) + (5120**2 + 5120 * 3584) // 4
    windows = 16 * 64**2 + 8 * 32**2 + 16**2  # of 36 x 36 patches: 16 of 8 x 8, 8 of 8 x 4, one of 4 x 4
    pairs = 4 * 1296**2 + 28 * windows
    assert forward_cases.flops(one, [[1, 36, 36]]) == 2 * 1296 * linear + 4 * 1280 * pairs


def test_the_large_product():
    case = forward_cases.matmul_case(CPU, torch.float32, threads=1)
    (row,) = measured(case)
    assert row["correct"] and (row["op"], row["impl"], row["case"]) == ("matmul", "matmul", "1024 x 1024 x 1024")
    assert row["params"] == {"flop": 2 * 1024**3, "threads": 1}


@pytest.mark.parametrize("dtype, less", [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
def test_a_large_product_of_less_precision_is_refused(dtype, less):
    limit = Matmul(128, dtype, CPU)
    assert limit.flop == 2 * 128**3 and limit.check(limit())[0]
    low = limit().to(less).to(dtype) if less else limit() * 1.02
    assert not limit.check(low)[0] and not limit.check(limit() * float("nan"))[0]
    with pytest.raises(ValueError, match="n=0"):
        Matmul(0, dtype, CPU)


def test_errors_layer_by_layer(arms):
    df = forward_cases.accuracy_rows("two", GRID, arms)
    assert list(df.columns) == ["case", "layer", "version", "error"]
    assert set(df.case) == {f"{arms.name}, two"} and df.groupby("version").layer.apply(list).to_dict() == {
        "transformers": [1, 2],
        "accelerate": [1, 2],
    }
    assert (df.error[df.version == "transformers"] == 0).all() and (df.error < 1e-5).all()
    assert not any(block._forward_hooks for one in arms.towers.values() for block in one.blocks)


def test_the_layer_that_is_wrong_is_found(arms):
    with torch.no_grad():
        arms.towers["accelerate"].blocks[1].attn.proj.weight.mul_(1.5)
    errors = forward_cases.accuracy_rows("two", GRID, arms).set_index(["version", "layer"]).error
    assert errors["accelerate", 1] < 1e-5 < 1e-4 < errors["accelerate", 2]


def test_traffic_of_both_forwards(arms):
    rows = list(forward_cases.traffic_rows("two", GRID, arms))
    assert all(value is not None and value > 0 for *_, value, _ in rows), rows
    assert [row[:3] for row in rows] == [
        (f"{arms.name}, two", f"forward: {version}", metric)
        for version in ("transformers", "accelerate")
        for metric in (traffic.OPERATORS, traffic.BYTES)
    ]


@pytest.mark.parametrize("size", ["tiny", "cpu", "gpu"], ids="size {}".format)
def test_the_grids_of_a_size(size):
    grids = forward_cases.forward_grids(cases.SIZES[size])
    for name, grid, values in grids:
        assert name and all(h % 2 == w % 2 == 0 for _, h, w in grid)
        assert values is None or (values.dtype, tuple(values.shape)) == (torch.float32, (cases.tokens(grid), 1176))
    assert len({name for name, *_ in grids}) == len(grids) == {"tiny": 1, "cpu": 3, "gpu": 4}[size]


def test_without_a_photo_a_batch_of_such_sizes(monkeypatch):
    monkeypatch.setattr(forward_cases.workloads, "photos", lambda: [])
    assert len(forward_cases.forward_grids(cases.SIZES["cpu"])) == 2
    assert forward_cases.forward_grids(cases.SIZES["gpu"])[-1] == ("mixed images", forward_cases.MIXED, None)


def test_own_pixels_are_those_that_are_seen(bf16):
    values = torch.randn(384, 1176, generator=torch.manual_seed(1))
    case = forward_case(bf16, values=values)
    assert torch.equal(case.inputs[0][0], values.bfloat16())
    assert not torch.equal(forward_case(bf16).inputs[0][0], values.bfloat16())


def test_float32_is_not_tf32_within():
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = True
        with forward_cases._in_float32():
            assert not any(place.allow_tf32 for place in places) and not torch.is_grad_enabled()
        assert all(place.allow_tf32 for place in places)
    finally:
        for place, value in zip(places, before):
            place.allow_tf32 = value


@pytest.mark.gpu
def test_every_version_on_a_gpu():
    device = torch.device("cuda")
    one = tower.make_tower(Geometry.qwen2_5_vl(), device, **tower.PUBLISHED | {"depth": 2})
    arms = forward_cases.Arms(one)
    rows = measured(forward_case(arms), device)
    assert [row["impl"] for row in rows] == [*forward_arms.THEIRS, *forward_arms.GPU_PARTS]
    assert all(row["correct"] and not row["error"] for row in rows), rows
    assert set(forward_cases.accuracy_rows("two", GRID, arms).layer) == {1, 2}
    counts = {row[1:3]: row[3] for row in forward_cases.traffic_rows("two", GRID, arms)}
    assert counts["forward: accelerate", "DtoH copies"] == counts["forward: accelerate", "cudaStreamSynchronize"] == 0
