"""Who encodes which frames: every frame once, balanced, never worse than whole images, the same everywhere."""

import itertools
import random
import subprocess
import sys

import pytest
import torch

import vitkit.parallel
from vitkit import Geometry
from vitkit.parallel import FrameCosts, assign, loads, whole_images
from vitkit.parallel.costs import published_costs

GEOMETRIES = Geometry.qwen2_vl(), Geometry.qwen2_5_vl()


def random_batch(rng, world, least, clips=0.0):
    """Images of 16 to 48 patches a side (as photos of 0.05 to 0.45 million pixels are), clips of smaller frames."""
    grid = []
    while sum(t for t, _, _ in grid) < least * world or rng.random() < 0.8:
        clip = rng.random() < clips
        high = 14 if clip else 24
        grid.append([rng.randint(2, 16) if clip else 1, 2 * rng.randint(8, high), 2 * rng.randint(8, high)])
    return grid


def batches(n, least, clips, seed=0):
    rng = random.Random(seed)
    for _ in range(n):
        world = rng.choice([2, 3, 4, 8, 16])
        yield world, rng.choice(GEOMETRIES), random_batch(rng, world, least, clips)


def check_cover(shares, grid, world):
    assert len(shares) == world and all(share == sorted(share) for share in shares)
    assert all(len({i for i, _, _ in share}) == len(share) for share in shares)  # at most one entry an image
    frames = sorted((i, first + k) for share in shares for i, first, n in share for k in range(n))
    assert frames == [(i, k) for i, (t, _, _) in enumerate(grid) for k in range(t)]
    assert all(n >= 1 for share in shares for _, _, n in share)


@pytest.mark.parametrize("least, clips", [(4, 0.0), (8, 0.3)])
def test_the_largest_load_is_at_most_a_tenth_above_the_mean(least, clips):
    # Few equal frames cannot be shared out evenly by anybody (5 on 4 ranks), so with clips there are more of them.
    for world, geometry, grid in batches(1000, least, clips):
        shares = assign(grid, world, geometry)
        found = loads(shares, grid, geometry)
        assert max(found) <= 1.1 * sum(found) / world, (world, geometry, grid)
        assert max(found) <= max(loads(whole_images(grid, world, geometry), grid, geometry))


def test_never_worse_than_whole_images_and_every_frame_once():
    for world, geometry, grid in batches(1000, 0, 0.3, seed=1):  # down to one image on 16 ranks
        usual = loads(whole_images(grid, world, geometry), grid, geometry)
        for unit in ("frame", "image"):
            shares = assign(grid, world, geometry, unit=unit)
            check_cover(shares, grid, world)
            assert max(loads(shares, grid, geometry)) <= max(usual)
            if unit == "image":
                assert all(first == 0 and n == grid[i][0] for share in shares for i, first, n in share)


def test_near_the_best_possible_where_that_can_be_tried_out():
    rng = random.Random(2)
    for _ in range(60):
        geometry, world = rng.choice(GEOMETRIES), rng.choice([2, 3])
        grid = [[rng.randint(1, 3), 2 * rng.randint(2, 32), 2 * rng.randint(2, 32)] for _ in range(3)]
        cost = [published_costs(geometry)(h, w) for t, h, w in grid for _ in range(t)]
        best = min(
            max(sum(c for c, r in zip(cost, where) if r == rank) for rank in range(world))
            for where in itertools.product(range(world), repeat=len(cost))
        )
        assert max(loads(assign(grid, world, geometry), grid, geometry)) <= 1.1 * best, (world, grid)


def test_units_are_exchanged_where_the_largest_first_is_not_the_best():
    costs = FrameCosts(per_patch=1, full=0)
    grid = [[1, 2, 6], [1, 2, 6], [1, 2, 4], [1, 2, 4], [1, 2, 4]]  # the largest first: 12 + 8 + 8 and 12 + 8
    for unit in ("frame", "image"):
        shares = assign(grid, 2, GEOMETRIES[0], unit=unit, costs=costs)
        assert loads(shares, grid, GEOMETRIES[0], costs=costs) == [24, 24]


def test_whole_images_are_shared_out_by_patches():
    grid = [[1, 4, 4], [1, 8, 8], [2, 4, 4], [1, 6, 8]]  # 16, 64, 32 and 48 patches
    assert whole_images(grid, 2, GEOMETRIES[0]) == [[(0, 0, 1), (1, 0, 1)], [(2, 0, 2), (3, 0, 1)]]


def test_a_long_clip_is_cut_and_whole_images_are_not():
    geometry, grid = Geometry.qwen2_5_vl(), [[1, 20, 20], [78, 24, 24], [1, 20, 20]]
    for world in (2, 4, 8):
        found = loads(assign(grid, world, geometry), grid, geometry)
        usual = loads(whole_images(grid, world, geometry), grid, geometry)
        assert max(found) < 1.1 * sum(found) / world < max(usual)


def test_equal_images_are_not_scattered():
    shares = assign([[1, 36, 36]] * 64, 4, GEOMETRIES[1])
    assert shares == [[(i, 0, 1) for i in range(16 * r, 16 * r + 16)] for r in range(4)]
    # ten long clips on eight ranks: few pieces
    assert sum(map(len, assign([[768, 24, 24]] * 10, 8, GEOMETRIES[1]))) <= 10 + 7


def test_few_or_no_units():
    for geometry in GEOMETRIES:
        assert assign([], 3, geometry) == whole_images([], 3, geometry) == [[], [], []]
        assert sorted(assign([[1, 4, 4], [1, 4, 4]], 4, geometry)) == [[], [], [(0, 0, 1)], [(1, 0, 1)]]
        assert assign([[3, 4, 4], [1, 8, 8]], 1, geometry) == [[(0, 0, 3), (1, 0, 1)]]


def test_the_same_from_lists_tensors_and_another_process():
    grid = random_batch(random.Random(3), 4, 8, 0.3)
    shares = assign(grid, 4, GEOMETRIES[1])
    assert assign(torch.tensor(grid), 4, GEOMETRIES[1]) == shares == assign([tuple(row) for row in grid], 4, Geometry())
    code = f"import vitkit.parallel, vitkit; print(vitkit.parallel.assign({grid}, 4, vitkit.Geometry.qwen2_5_vl()))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout
    assert said.strip() == str(shares)


def test_huge_frames_overflow_nothing():
    grid = [[1, 2**14, 2**15], [1, 2**14, 2**15], [2, 2**14, 2**14]]
    assert sorted(assign(grid, 3, GEOMETRIES[0])) == [[(0, 0, 1)], [(1, 0, 1)], [(2, 0, 2)]]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"world_size": 0}, "world_size=0: an integer of at least 1"),
        ({"world_size": True}, "world_size=True"),
        ({"unit": "window"}, "unit='window': one of frame, image"),
        ({"grid_thw": [[1, 3, 4]]}, "multiples of spatial_merge_size=2"),
        ({"geometry": None}, "a vitkit.Geometry is allowed"),
    ],
)
def test_refused(changed, said):
    arguments = {"grid_thw": [[1, 4, 4]], "world_size": 2, "geometry": Geometry(), "unit": "frame"} | changed
    with pytest.raises(ValueError, match=said):
        vitkit.parallel.assign(**arguments)


# ---- the costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_costs_are_the_flop_of_the_published_towers(kind):
    """Against the count that notebook 5 takes from the modules themselves."""
    pytest.importorskip("transformers")
    from vitkit.lab.forward_cases import flops
    from vitkit.lab.tower import PUBLISHED, PUBLISHED_QWEN2, make_tower

    geometry = getattr(Geometry, kind)()
    with torch.device("meta"):
        tower = make_tower(geometry, "meta", **(PUBLISHED if geometry.window else PUBLISHED_QWEN2))
    exact, rounded = FrameCosts.from_config(tower.config), published_costs(geometry)
    for h, w in ((4, 4), (36, 36), (50, 26), (128, 96)):
        assert exact(h, w) == flops(tower, [[1, h, w]])
        assert abs(rounded(h, w) / exact(h, w) - 1) < 0.01


def test_costs_of_a_narrow_tower_follow_its_config():
    pytest.importorskip("transformers")
    from tower_models import KINDS, make

    from vitkit.lab.forward_cases import flops

    for kind in KINDS:
        tower = make(kind)
        costs = FrameCosts.from_config(tower.config)
        assert all(costs(h, w) == flops(tower, [[1, h, w]]) for h, w in ((2, 2), (8, 10), (30, 6)))


def test_attention_counts_its_windows_and_frames():
    costs = FrameCosts(per_patch=0, full=1, windowed=0, side=8)
    assert costs(10, 12) == 120**2
    windows = FrameCosts(per_patch=0, full=0, windowed=1, side=8)  # of 8x8, 8x4, 2x8 and 2x4 patches
    assert windows(10, 12) == 64**2 + 32**2 + 16**2 + 8**2
