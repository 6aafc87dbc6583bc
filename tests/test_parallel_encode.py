"""`vitkit.parallel.encode` on real gloo processes: the same as one process, what moves, and how it fails."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import ranks
import tower_models

import vitkit.parallel
from vitkit import Geometry
from vitkit.parallel import RankError, assign, encode, exchange
from vitkit.parallel.encoder import Share

CLIP = [[1, 6, 4], [40, 4, 4], [1, 8, 8], [1, 2, 2]]
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


def pixels_of(grid, tower, seed=0):
    return tower_models.batch(grid or torch.zeros(0, 3, dtype=int), tower, seed)[0]


def alone(tower, pixels, grid):
    """What one process computes: (U, 48)."""
    if not grid:
        return pixels.new_zeros(0, 48)
    with torch.no_grad():
        return tower(pixels, grid_thw=torch.tensor(grid)).pooler_output


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
    """(rows that the tower got, bytes of this rank's upload, bytes sent or received by broadcasts, by all_gather).

    Every row that is another rank's is NaN here, so nothing of it can have been used.
    """
    tower = tower_models.make(kind, depth=1)
    pixels, geometry = pixels_of(MIXED, tower), Geometry.from_config(tower.config)
    exact = alone(tower, pixels, MIXED)
    costs = vitkit.parallel.FrameCosts.from_config(tower.config)
    share = Share(assign(MIXED, world, geometry, costs=costs), MIXED, geometry, rank)
    own = torch.zeros(len(pixels), dtype=torch.bool)
    for start, stop in share.rows:
        own[start:stop] = True
    pixels[~own] = float("nan")

    counts = {"rows": 0, "upload": 0, "broadcast": 0, "all_gather": 0}

    def see(module, args):
        counts["rows"] += len(args[0])
        counts["upload"] += args[0].numel() * args[0].element_size()

    def broadcast(tensor, **options):
        counts["broadcast"] += tensor.numel() * tensor.element_size()
        return theirs[0](tensor, **options)

    def all_gather(tensors, tensor, **options):
        counts["all_gather"] += sum(x.numel() * x.element_size() for x in tensors)
        return theirs[1](tensors, tensor, **options)

    theirs = dist.broadcast, dist.all_gather
    tower.patch_embed.register_forward_pre_hook(see)
    exchange.dist.broadcast, exchange.dist.all_gather = broadcast, all_gather
    features = encode(tower, pixels, MIXED)
    exchange.dist.broadcast, exchange.dist.all_gather = theirs
    assert (features - exact).norm() <= 1e-6 * exact.norm()
    return int(own.sum()), pixels[0].numel() * pixels.element_size(), exact.numel() * exact.element_size(), counts


@pytest.mark.parametrize("kind", tower_models.KINDS)
def test_a_rank_uploads_its_own_rows_and_the_gather_moves_no_padding(kind, tmp_path):
    answers = ranks.run(4, moved, 4, kind, folder=tmp_path)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        own, row_bytes, features, counts = answer
        assert counts["rows"] == own and counts["upload"] == own * row_bytes
        assert counts["broadcast"] == features and counts["all_gather"] == 4 * exchange.MESSAGE
    assert sum(own for own, *_ in answers) == sum(t * h * w for t, h, w in MIXED)


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


# ---- failing --------------------------------------------------------------------------------------------------------


def fails_once(rank, bad, how):
    """The RankError's text, failures and cause on this rank, and the error of a call after it."""
    tower = tower_models.make("qwen2_5_vl", depth=1)
    grid, pixels = CLIP, pixels_of(CLIP, tower)
    exact = alone(tower, pixels, CLIP)
    arguments = [tower, pixels, grid]
    handle = None
    if rank in bad:
        if how == "forward":

            def see(module, args):
                raise MemoryError("no\nroom: " + 1000 * "x")

            handle = tower.blocks[0].register_forward_pre_hook(see)
        else:
            arguments = {
                "pixels": [tower, pixels[1:], grid],
                "rows": [tower, pixels, [[1, 3, 4]]],
                "tower": [tower.blocks[0], pixels, grid],
                "grids": [tower, pixels, [[1, 4, 6], *grid[1:]]],  # as many patches
            }[how]
    try:
        encode(*arguments)
        said = None
    except RankError as error:
        said = str(error), error.failures, type(error.__cause__).__name__
    if handle:
        handle.remove()
    return said, tower_models.error([encode(tower, pixels, grid)], [exact])


CAUSES = {
    "forward": "MemoryError: no room: xxx",
    "pixels": "ValueError: pixel_values: (731, 1176), but a tensor (732, 1176)",
    "rows": "ValueError: grid_thw[0]=[1, 3, 4]",
    "tower": "ValueError: tower is a transformers.models",
}


@pytest.mark.parametrize("how", CAUSES)
def test_an_exception_on_one_rank_is_raised_on_all(how, tmp_path):
    bad = (1, 2) if how == "forward" else (1,)
    for rank, answer in enumerate(ranks.run(3, fails_once, bad, how, folder=tmp_path, limit=120)):
        if isinstance(answer, Exception):
            raise answer
        (said, failures, cause), after = answer
        assert set(failures) == set(bad) and all(text.startswith(CAUSES[how]) for text in failures.values())
        assert said.startswith(f"rank 1 of 3 failed: {CAUSES[how]}") and len(said) < 1100 and "\n" not in said
        assert cause == (CAUSES[how].split(":")[0] if rank in bad else "NoneType")
        assert after <= 1e-6  # and the group still works


def test_different_grids_are_an_error_on_every_rank(tmp_path):
    for answer in ranks.run(3, fails_once, (2,), "grids", folder=tmp_path, limit=120):
        if isinstance(answer, Exception):
            raise answer
        (said, failures, _), after = answer
        assert "called with different grids" in said and failures == {} and after <= 1e-6
        assert all(f"rank {r}: 4 images or clips of 732 patches (grid " in said for r in range(3))


def dies(rank, how):
    """Seconds until the error on a rank that lives, and the error; rank 1 is killed in its forward, or stays away."""
    tower = tower_models.make("qwen2_vl", depth=1)
    pixels = pixels_of(CLIP, tower)
    dist.barrier()
    if rank == 1 and how == "killed":
        tower.blocks[0].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    if rank == 1 and how == "away":
        time.sleep(6)
        return None
    try:
        encode(tower, pixels, CLIP)
    except RuntimeError as error:
        return time.monotonic() - start, str(error)


@pytest.mark.parametrize("how", ["killed", "away"])
def test_a_rank_that_dies_or_stays_away_ends_the_others(how, tmp_path):
    answers = ranks.run(3, dies, how, folder=tmp_path, group_timeout=4, limit=60)
    if how == "killed":
        assert isinstance(answers[1], ranks.Ended) and answers[1].args == (-signal.SIGKILL,)
    for rank in (0, 2):
        seconds, said = answers[rank]
        assert seconds < 15 and said.startswith("the exchange with the other ranks failed")


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
    for answer in ranks.run(world, on_gpus, backend, kind, folder=tmp_path, backend=backend):
        if isinstance(answer, Exception):
            raise answer
        error, uploaded, own, device = answer
        assert error <= 2**-7 and device == "cuda"
        if backend == "nccl":  # beside its rows: index tensors, some 20 bytes a patch of 2,352, and 512 bytes of status
            assert own <= uploaded <= 1.1 * own + 4096
