"""`vitkit.parallel.encode` on real gloo processes: the same as one process, and what moves."""

import random

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import ranks
import tower_models
from ranks import CLIP, alone, pixels_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vitkit.parallel
from vitkit import Geometry
from vitkit.parallel import assign, encode, exchange
from vitkit.parallel.encoder import Share

MIXED = [[1, 8, 8], [2, 4, 6], [1, 2, 2], [1, 18, 22], [5, 4, 4], [1, 4, 12], [1, 6, 6]]
SPECIAL = [[], [[1, 4, 4]], [[1, 2, 2], [1, 4, 8]], CLIP, MIXED, [[1, 6, 6]] * 9, [[3, 4, 4]]]


def batches(n, seed=0):
    """SPECIAL, and random ones of up to eight images and short clips."""
    rng = random.Random(seed)
    found = list(SPECIAL)
    while len(found) < n:
        rows = rng.randint(1, 8)
        found.append([[rng.choice((1, 1, 1, 2, 5)), 2 * rng.randint(1, 6), 2 * rng.randint(1, 6)] for _ in range(rows)])
    return found


# ---- the same as one process ----------------------------------------------------------------------------------------


def errors(rank, kind, grids, dtype=torch.float32, accelerated=False):
    """For every batch (relative error against rank 0 alone, whether the bits are rank 0's)."""
    tower = tower_models.make(kind, dtype, depth=2)
    if accelerated:
        vitkit.accelerate_(tower)
    found = []
    for seed, grid in enumerate(grids):
        pixels = pixels_of(grid, tower, seed)
        features = encode(tower, pixels, grid)
        exact = alone(tower, pixels, grid) if rank == 0 else torch.empty_like(features)
        assert features.shape == exact.shape and features.dtype == dtype
        first = features.clone()
        for tensor in (exact, first):
            dist.broadcast(tensor.view(torch.uint8), 0)
        difference = (features - exact).float().norm() / exact.float().norm() if grid else torch.tensor(0.0)
        found.append((difference.item(), torch.equal(features, first)))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_hundred_batches_equal_one_process(world, tmp_path):
    grids = batches(100)
    assert any(0 < len(grid) < world for grid in grids)
    for kind in tower_models.KINDS:
        for answer in ranks.run(world, errors, kind, grids, folder=tmp_path):
            check(answer, 1e-6)
            assert len(answer) == 100


def check(answer, allowed):
    if isinstance(answer, Exception):
        raise answer
    assert max(error for error, _ in answer) <= allowed and all(same for _, same in answer)


def several(rank, kind, grids, ways):
    return [errors(rank, kind, grids, dtype, accelerated) for dtype, accelerated in ways]


@pytest.mark.parametrize("kind", tower_models.KINDS)
def test_accelerated_towers_and_16_bit(kind, tmp_path):
    ways = [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)]
    for answers in ranks.run(3, several, kind, batches(12), ways, folder=tmp_path):
        if isinstance(answers, Exception):
            raise answers
        for answer, (dtype, _) in zip(answers, ways):
            check(answer, 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


def part_of_the_ranks(rank):
    """Ranks 1 and 2 of 3 encode in a group of their own; rank 0 is no member."""
    group = dist.new_group([1, 2])
    tower = tower_models.make("qwen2_5_vl", depth=1)
    pixels = pixels_of(MIXED, tower)
    if rank == 0:
        with pytest.raises(ValueError, match="a group that holds this process"):
            encode(tower, pixels, MIXED, group=group)
        return 0.0
    features = encode(tower, pixels, torch.tensor(MIXED), group=group)
    assert not features.requires_grad and not features.is_inference()
    return tower_models.error([features], [alone(tower, pixels, MIXED)])


def test_a_group_that_is_a_part_of_the_ranks(tmp_path):
    for answer in ranks.run(3, part_of_the_ranks, folder=tmp_path):
        if isinstance(answer, Exception):
            raise answer
        assert answer <= 1e-6


def test_without_a_process_group():
    tower = tower_models.make("qwen2_vl", depth=1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        encode(tower, pixels_of(MIXED, tower), MIXED)


# ---- what moves -----------------------------------------------------------------------------------------------------


def moved(rank, world, kind):
    """(rows of its own, rows of the pixels that any operator read, bytes of all features, bytes sent or received by
    broadcasts and by all_gather). What an upload takes is read by it; and every row of another rank is NaN here."""
    tower = tower_models.make(kind, depth=1)
    pixels, geometry = pixels_of(MIXED, tower), Geometry.from_config(tower.config)
    exact = alone(tower, pixels, MIXED)
    costs = vitkit.parallel.FrameCosts.from_config(tower.config)
    share = Share(assign(MIXED, world, geometry, costs=costs), MIXED, geometry, rank)
    own = torch.zeros(len(pixels), dtype=torch.bool)
    for start, stop in share.rows:
        own[start:stop] = True
    pixels[~own] = float("nan")

    counts, read = {"broadcast": 0, "all_gather": 0}, torch.zeros_like(own)

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves([args, kwargs]) if not _lies_in(pixels, out) else ():  # a view reads nothing
                if _lies_in(pixels, x):
                    first = x.storage_offset() // pixels.shape[1]
                    read[first : first + x.numel() // pixels.shape[1]] = True
            return out

    def broadcast(tensor, **options):
        counts["broadcast"] += tensor.numel() * tensor.element_size()
        return theirs[0](tensor, **options)

    def all_gather(tensors, tensor, **options):
        counts["all_gather"] += sum(x.numel() * x.element_size() for x in tensors)
        return theirs[1](tensors, tensor, **options)

    theirs = dist.broadcast, dist.all_gather
    exchange.dist.broadcast, exchange.dist.all_gather = broadcast, all_gather
    with Reads():
        features = encode(tower, pixels, MIXED)
    exchange.dist.broadcast, exchange.dist.all_gather = theirs
    assert (features - exact).norm() <= 1e-6 * exact.norm()
    return own.tolist(), read.tolist(), exact.numel() * exact.element_size(), counts


def _lies_in(whole, x):
    return isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", tower_models.KINDS)
def test_a_rank_uploads_its_own_rows_and_the_gather_moves_no_padding(kind, tmp_path):
    answers = ranks.run(4, moved, 4, kind, folder=tmp_path)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        own, read, features, counts = answer
        assert read == own and counts == {"broadcast": features, "all_gather": 4 * exchange.MESSAGE}
    assert [sum(row) for row in zip(*(own for own, *_ in answers))] == [1] * sum(t * h * w for t, h, w in MIXED)


def test_a_share_joins_rows_and_keeps_the_order():
    geometry = Geometry.qwen2_5_vl()
    shares = [[(1, 0, 2), (2, 0, 1)], [(0, 0, 1), (1, 2, 1)], []]  # a clip of three frames is cut
    grid = [(1, 2, 4), (3, 4, 4), (1, 2, 2)]
    first, second, third = (Share(shares, grid, geometry, rank) for rank in range(3))
    assert first.grid == [[2, 4, 4], [1, 2, 2]] and first.rows == [(8, 40), (56, 60)]
    assert second.grid == [[1, 2, 4], [1, 4, 4]] and second.rows == [(0, 8), (40, 56)]
    assert third.grid == [] and third.rows == [] and third.start == 15
    assert first.units == [9, 6, 0] and first.order == [(9, 2), (0, 8), (11, 4), (8, 1)]
    whole = Share([[(0, 0, 1), (1, 0, 1)], [(1, 1, 2), (2, 0, 1)]], grid, geometry, 0)
    assert whole.rows == [(0, 24)] and whole.order == [(0, 15)]  # nothing to put back in order


# ---- GPUs -----------------------------------------------------------------------------------------------------------


def on_gpus(rank, backend, kind):
    """(relative error, bytes uploaded, own bytes, device of the result) of an encode of rows on the CPU."""
    from vitkit.lab import traffic

    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    tower = vitkit.accelerate_(tower_models.make(kind, torch.bfloat16, device, depth=2))
    grid = [[1, 36, 36], [6, 24, 24], [1, 20, 30]]
    pixels = pixels_of(grid, tower).cpu()
    exact = alone(tower, pixels.to(device), grid)
    features = encode(tower, pixels, grid)
    geometry = Geometry.from_config(tower.config)
    costs = vitkit.parallel.FrameCosts.from_config(tower.config)
    share = Share(assign(grid, dist.get_world_size(), geometry, costs=costs), grid, geometry, rank)
    own = sum(stop - start for start, stop in share.rows) * pixels[0].numel() * 2
    counted = traffic.count(lambda: encode(tower, pixels, grid), device).counts["HtoD bytes"][0]
    error = ((features.float() - exact.float()).norm() / exact.float().norm()).item()
    return error, counted, own, features.device.type


@pytest.mark.gpu
@pytest.mark.parametrize("kind", tower_models.KINDS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_on_gpus(backend, kind, tmp_path):
    """NCCL with a GPU a rank; gloo with two ranks on one GPU, rows through the CPU."""
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < 2:
        pytest.skip(f"NCCL takes a GPU for each rank: 2 are needed, {gpus} is here")
    world = min(4, gpus) if backend == "nccl" else 2
    for answer in ranks.run(world, on_gpus, backend, kind, folder=tmp_path, backend=backend, start="spawn"):
        if isinstance(answer, Exception):
            raise answer
        error, uploaded, own, device = answer
        assert error <= 2**-7 and device == "cuda"
        if backend == "nccl":  # beside its rows: index tensors, some 20 bytes a patch of 2,352, and 512 bytes of status
            assert own <= uploaded <= 1.1 * own + 4096
