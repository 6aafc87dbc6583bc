"""Who encodes which frames: `assign`, and `whole_images`, the usual way that it must never be worse than.

Both are pure functions of their arguments, in plain integers: every rank computes the same lists and none is sent.
"""

from bisect import bisect_left
from heapq import heapify, heapreplace
from operator import mul

from ..geometry import Geometry, check_grid_thw
from .costs import FrameCosts, published_costs

UNITS = ("frame", "image")
CLOSE = 1000  # moves end when the largest load is within 1/1000 of what no assignment can be below
MOVES = 200
PARTS = 32  # a clip goes out in parts of up to 1/32 of a rank's mean load: finer ones would only be more pieces


def assign(grid_thw, world_size: int, geometry: Geometry, *, unit="frame", costs: FrameCosts | None = None) -> list:
    """Each rank's list of (image, first frame, frames), balanced by cost; sorted, at most one entry an image.

    grid_thw: (G, 3) in patches, as everywhere on the CPU. unit: what is not cut, "frame" or "image". costs: those of
    the tower where it is not a published one (`FrameCosts.from_config`). Every frame is in one list; a list may be
    empty. Units go to the least loaded rank, the largest first; then units are moved and exchanged while that lowers
    the largest load. It is never larger than that of `whole_images`. ValueError if an argument is not allowed.
    """
    grid = check_grid_thw(grid_thw, geometry)
    _check(world_size, unit)
    cost = _cost_of(grid, costs or published_costs(geometry))
    times = [t for t, _, _ in grid] if unit == "frame" else [1] * len(grid)
    each = cost if unit == "frame" else [t * c for (t, _, _), c in zip(grid, cost)]
    shares = _lists(_balanced(times, each, world_size), times, each)
    if unit == "image":
        shares = [[(i, 0, grid[i][0]) for i, _, _ in share] for share in shares]
    owners, highest = _whole(grid, world_size), max(_loads(shares, cost))
    usual = [0] * world_size
    for rank, (t, _, _), c in zip(owners, grid, cost):
        usual[rank] += t * c
    return _as_lists(owners, grid, world_size) if max(usual) < highest else shares


def whole_images(grid_thw, world_size: int, geometry: Geometry) -> list:
    """The usual way, in the form of `assign`: whole images by number of patches, the largest first, each to the rank
    that has the fewest patches so far."""
    grid = check_grid_thw(grid_thw, geometry)
    _check(world_size, "image")
    return _as_lists(_whole(grid, world_size), grid, world_size)


def loads(shares, grid_thw, geometry: Geometry, *, costs: FrameCosts | None = None) -> list[int]:
    """FLOP of each rank's list."""
    return _loads(shares, _cost_of(check_grid_thw(grid_thw, geometry), costs or published_costs(geometry)))


def _check(world_size, unit):
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: an integer of at least 1 is allowed")
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r}: one of {', '.join(UNITS)} is allowed")


def _cost_of(grid, costs) -> list[int]:
    known = {size: costs(*size) for size in {(h, w) for _, h, w in grid}}
    return [known[h, w] for _, h, w in grid]


def _loads(shares, cost):
    return [sum(n * cost[i] for i, _, n in share) for share in shares]


def _whole(grid, world_size) -> list[int]:
    """The rank of every image."""
    patches = [t * h * w for t, h, w in grid]
    owners, heap = [0] * len(grid), [(0, rank) for rank in range(world_size)]
    for i in sorted(range(len(grid)), key=patches.__getitem__, reverse=True):
        load, owners[i] = heap[0]
        heapreplace(heap, (load + patches[i], owners[i]))
    return owners


def _as_lists(owners, grid, world_size):
    shares = [[] for _ in range(world_size)]
    for i, rank in enumerate(owners):
        shares[rank].append((i, 0, grid[i][0]))
    return shares


def _balanced(times, each, world_size) -> list[dict]:
    """For every rank {cost of a unit: how many}. Units of one cost are alike, so only their numbers are decided."""
    totals = {}
    for n, c in zip(times, each):
        totals[c] = totals.get(c, 0) + n
    held, load = [{} for _ in range(world_size)], [0] * world_size
    heap = [(0, rank) for rank in range(world_size)]
    mean = -(-sum(map(mul, times, each)) // world_size)
    for c in sorted(totals, reverse=True):
        n = totals[c]
        k = max(1, mean // (PARTS * c))  # units that go out together
        if n >= 4 * k * world_size:  # many alike: up to a common level at once, and only the last few one by one
            n -= _fill(held, load, c, n)
            heap = [(x, rank) for rank, x in enumerate(load)]
            heapify(heap)
        while n:
            k = min(k, n)
            x, rank = heap[0]
            held[rank][c] = held[rank].get(c, 0) + k
            load[rank] = x = x + k * c
            heapreplace(heap, (x, rank))
            n -= k
    least = max(mean, max(each, default=0))
    for _ in range(MOVES if world_size > 1 else 0):
        if max(load) <= least + least // CLOSE or not _improve(held, load):
            break
    return held


def _fill(held, load, c, n) -> int:
    """Gives every rank units of cost c as long as it stays below a level that the n units cannot fill; how many."""
    level, below, used = None, 0, 0
    for x in sorted(load):  # ranks below the level, one more at a time
        if level is not None and x >= level:
            break
        below, used = below + 1, used + x
        level = (used + (n - 1) * c) // below
    counts = [max(0, (level - x) // c) for x in load]
    for rank, count in enumerate(counts):
        if count:
            held[rank][c] = held[rank].get(c, 0) + count
            load[rank] += count * c
    return sum(counts)


def _improve(held, load) -> bool:
    """Moves a unit off the most loaded rank, or exchanges it for a smaller one, so that the larger of the two loads
    falls the most; False where nothing lowers it. Ranks are tried from the least loaded on."""
    top = max(range(len(load)), key=load.__getitem__)
    for other in sorted(range(len(load)), key=load.__getitem__):
        gap = load[top] - load[other]
        if gap <= 1:
            return False
        theirs, best = [0, *sorted(held[other])], None  # 0: nothing comes back
        for a in held[top]:
            at = bisect_left(theirs, a - gap // 2)
            for b in theirs[max(0, at - 1) : at + 1]:
                if 0 < a - b < gap and (best is None or abs(2 * (a - b) - gap) < best[0]):
                    best = abs(2 * (a - b) - gap), a, b
        if best:
            _, a, b = best
            for giver, taker, c in ((top, other, a), (other, top, b)):
                if c:
                    _add(held[giver], c, -1)
                    _add(held[taker], c, 1)
            load[top] -= a - b
            load[other] += a - b
            return True
    return False


def _add(counts, c, n):
    counts[c] = counts.get(c, 0) + n
    if not counts[c]:
        del counts[c]


def _lists(held, times, each) -> list[list]:
    """Lists of (image, first unit, units): in the order of images, each rank takes as many units of a cost as it holds,
    so that few images are cut and a rank's rows lie together."""
    queues = {}  # of every cost, the ranks that still take units of it, the next one last
    for rank in reversed(range(len(held))):
        for c, n in held[rank].items():
            queues.setdefault(c, []).append([rank, n])
    shares = [[] for _ in held]
    for i, (n, c) in enumerate(zip(times, each)):
        first, queue = 0, queues[c]
        while first < n:
            entry = queue[-1]
            took = min(entry[1], n - first)
            shares[entry[0]].append((i, first, took))
            first += took
            entry[1] -= took
            if not entry[1]:
                queue.pop()
    return shares
