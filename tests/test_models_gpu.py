"""Accelerated towers on a GPU: graphs, traffic, memory, and accuracy in 16 bits."""

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
from tower_models import ALL, GRIDS, KINDS, accelerate, batch, error, make, outputs

import vitkit
from vitkit.models import accelerated, graphs, restore_

pytestmark = pytest.mark.gpu


@pytest.fixture(params=KINDS)
def tower(request):
    return make(request.param, torch.bfloat16, "cuda")


def reference(tower):
    exact = copy.deepcopy(tower).float()
    return lambda pixels, grid: outputs(exact, pixels.float(), grid.to(pixels.device))


def random_grid(rng, images=4, frames=3, side=12):
    return [
        [int(rng.integers(1, frames + 1)), *(2 * rng.integers(1, side, 2)).tolist()]
        for _ in range(rng.integers(1, images + 1))
    ]


@pytest.mark.parametrize(
    "parts",
    [
        ["plan", "attention"],
        ["embed"],
        ["rotary"],
        ["mlp"],
        ["norms"],
        ["plan", "rotary", "attention", "windows"],
        ALL,
        "auto",
    ],
)
def test_no_further_from_float32_than_the_original(tower, parts):
    exact_of = reference(tower)
    with torch.no_grad():
        for grid in (*GRIDS, [[1, 36, 36]]):
            pixels, table = batch(grid, tower)
            exact = exact_of(pixels, table)
            theirs = error(outputs(tower, pixels, table.cuda()), exact)
            with accelerate(tower, parts), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a grid on the GPU
                for _ in range(4):  # without a graph, captured, replayed
                    mine = outputs(tower, pixels, table if "plan" in parts or parts == "auto" else table.cuda())
                    assert error(mine, exact) <= 1.1 * theirs


def test_graphs_are_captured_and_follow_the_batch(tower):
    exact_of = reference(tower)
    with accelerate(tower, "auto"), torch.no_grad():
        state = accelerated(tower).graphs
        # one budget of 512 patches: equal numbers of patches with other boundaries, and fewer patches
        for grid in ([[1, 16, 32]], [[1, 32, 16]], [[2, 16, 16]], [[1, 8, 56], [1, 8, 8]], [[1, 12, 40]]) * 2:
            pixels, table = batch(grid, tower)
            mine = outputs(tower, pixels, table)
            assert error(mine, exact_of(pixels, table)) < 2e-2
        assert list(state.by_budget) == [512]
        for grid in ([[1, 2, 1024]], [[1, 2, 1024]], [[1, 16, 32]], [[1, 2, 2048]]):  # longer tables of angles
            pixels, table = batch(grid, tower)
            for _ in range(3):
                assert error(outputs(tower, pixels, table), exact_of(pixels, table)) < 2e-2
        assert sorted(state.by_budget) == [512, 2048, 4096]
        first = outputs(tower, *batch([[1, 16, 32]], tower, seed=1))
        kept = [x.clone() for x in first]
        outputs(tower, *batch([[1, 16, 32]], tower, seed=2))
        assert all(map(torch.equal, first, kept))  # results are the caller's own


@pytest.mark.parametrize("change", ["in place", "assigned", "hook", "dtype"])
def test_a_graph_is_not_used_where_it_would_be_wrong(tower, change):
    pixels, table = batch([[1, 16, 16]], tower)
    with accelerate(tower, "auto"), torch.no_grad():
        for _ in range(3):
            outputs(tower, pixels, table)
        assert accelerated(tower).graphs.by_budget
        seen = []
        if change == "in place":
            for p in tower.parameters():
                p.mul_(1.25)
        elif change == "assigned":
            for p in tower.parameters():
                p.data = p.data * 1.25
        elif change == "dtype":
            tower.half()
            pixels = pixels.half()
        else:
            tower.blocks[0].mlp.register_forward_hook(lambda *_: seen.append(1))
        mine = outputs(tower, pixels, table)
        assert len(seen) == (change == "hook")
    with torch.no_grad():
        assert error(mine, reference(tower)(pixels, table)) < 2e-2


def test_a_batch_that_no_budget_holds_runs_without_a_graph(tower):
    exact_of = reference(tower)
    many = [[1, 2, 2]] * 40  # more images than a budget of 256 patches has
    large = [[1, 64, 80]]  # beyond the largest budget
    with accelerate(tower, "auto"), torch.no_grad():
        for grid in (many, large):
            pixels, table = batch(grid, tower)
            for _ in range(3):
                assert error(outputs(tower, pixels, table), exact_of(pixels, table)) < 2e-2
        assert not accelerated(tower).graphs.by_budget


def test_nothing_waits_and_one_upload(tower):
    pixels, table = batch([[1, 36, 36]], tower)
    with accelerate(tower, "auto"), torch.no_grad():
        for grid in (table, torch.tensor([[1, 64, 80]])):  # with a graph, and without
            pixels, grid = batch(grid.tolist(), tower)
            for _ in range(3):
                tower(pixels, grid)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                tower(pixels, grid)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                tower(pixels, grid)
                torch.cuda.synchronize()
            copies = [event.name for event in profile.events() if event.name.startswith("Memcpy")]
            assert sum("HtoD" in name for name in copies) == 1 and not any("DtoH" in name for name in copies)


def test_200_batches_and_flat_memory(tower):
    rng, exact_of = np.random.default_rng(3), reference(tower)
    grids = [random_grid(rng) for _ in range(200)]
    with accelerate(tower, "auto"), torch.no_grad():

        def run(check):
            for i, grid in enumerate(grids):
                pixels, table = batch(grid, tower, seed=i)
                mine = outputs(tower, pixels, table)
                if check:
                    exact = exact_of(pixels, table)
                    theirs = error(type(tower).forward(tower, pixels, table.cuda()).to_tuple()[:2], exact)
                    assert error(mine, exact) <= 1.1 * theirs + 1e-3
                del mine
            gc.collect()
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()

        run(check=False)
        before = run(check=False)
        assert run(check=False) <= before
        run(check=True)
        assert len(accelerated(tower).graphs.by_budget) <= graphs.MAX_TOKENS // graphs.STEP


def test_inference_mode_then_no_grad_then_training(tower):
    pixels, table = batch([[1, 24, 24]], tower)
    with accelerate(tower, "auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.inference_mode():
            for _ in range(3):
                exact = [x.clone() for x in outputs(tower, pixels, table)]
        with torch.no_grad():
            mine = outputs(tower, pixels, table)
        assert all(map(torch.equal, mine, exact))
        tower(pixels, table).pooler_output.sum().backward()
        assert all(p.grad is not None for p in tower.parameters())


def test_another_stream_waits_for_the_buffers(tower):
    pixels, table = batch([[1, 24, 24]], tower)
    with accelerate(tower, "auto"), torch.no_grad():
        for _ in range(3):
            exact = outputs(tower, pixels, table)
        torch.cuda.synchronize()
        streams, results = [torch.cuda.Stream() for _ in range(4)], []
        for stream in streams * 3:
            with torch.cuda.stream(stream):
                results.append(outputs(tower, pixels, table))
        torch.cuda.synchronize()
    for mine in results:
        assert all(map(torch.equal, mine, exact))


def test_within_the_callers_own_graph(tower):
    pixels, table = batch([[1, 24, 24]], tower)
    plan = vitkit.VisionPlan.from_grid(table, vitkit.Geometry.from_config(tower.config), device="cuda")
    with accelerate(tower, "auto"), torch.no_grad():
        for _ in range(3):
            exact = outputs(tower, pixels, table, **plan.model_kwargs())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mine = outputs(tower, pixels, table, **plan.model_kwargs())
        graph.replay()
        assert all(map(torch.equal, mine, exact))


def test_float32_goes_by_segments(tower, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # else the original's convolution is in TF32
    tower = tower.float()
    for grid in GRIDS:
        pixels, table = batch(grid, tower)
        with torch.no_grad():
            exact = outputs(tower, pixels, table.cuda())
            with accelerate(tower, "auto"):
                assert error(outputs(tower, pixels, table), exact) < 1e-5
            with accelerate(tower, ["mlp"]):
                assert error(outputs(tower, pixels, table.cuda()), exact) < 1e-5


def test_gradients_and_a_grid_on_the_gpu(tower):
    pixels, table = batch(GRIDS[1], tower)

    def gradients():
        tower.zero_grad()
        tower(pixels, table.cuda()).pooler_output.float().square().mean().backward()
        return [p.grad.float().clone() for p in tower.parameters()]

    exact = gradients()
    with accelerate(tower, "auto"):
        with pytest.warns(UserWarning, match="gradients are recorded.*graph, mlp, norms, windows"):
            mine = gradients()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gradients()  # says each thing once
    for a, b in zip(mine, exact):
        assert (a - b).norm() <= 0.03 * b.norm() + 1e-6
    restore_(tower)


def test_threads(tower):
    import threading

    pixels, table = batch([[1, 24, 24]], tower)
    with accelerate(tower, "auto"):
        with torch.no_grad():
            for _ in range(3):
                exact = outputs(tower, pixels, table)
        results = []

        def work():
            with torch.no_grad():
                results.extend(outputs(tower, pixels, table) for _ in range(20))

        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert len(results) == 80 and all(all(map(torch.equal, mine, exact)) for mine in results)
