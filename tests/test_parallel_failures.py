"""`vitkit.parallel.encode` on real gloo processes when something fails: an error on every rank, none left waiting."""

import os
import signal
import time

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

import ranks
import tower_models
from ranks import CLIP, alone, pixels_of

from vitkit.parallel import RankError, encode, exchange


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
                "integers": [tower, pixels.long(), grid],
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
    "integers": "ValueError: pixel_values: torch.int64, but a floating-point",
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
        assert all(f"rank {r}: call 1: 4 images or clips of 732 patches (grid " in said for r in range(3))


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def hard_to_tell(rank, how):
    """(type of the error, its failures) of a call that fails on rank 1, and the error of the next with other pixels."""
    tower = tower_models.make("qwen2_vl", depth=1)
    error = {"mute": Mute(), "surrogate": RuntimeError("\ud800 lone"), "interrupt": KeyboardInterrupt()}[how]

    def fail(*_):
        raise error

    handle = tower.blocks[0].register_forward_pre_hook(fail) if rank == 1 else None
    try:
        encode(tower, pixels_of(CLIP, tower), CLIP)
        said = None
    except BaseException as caught:
        said = type(caught).__name__, getattr(caught, "failures", None)
    if handle:
        handle.remove()
    pixels = pixels_of(CLIP, tower, 1)
    return said, tower_models.error([encode(tower, pixels, CLIP)], [alone(tower, pixels, CLIP)])


TOLD = {"mute": "Mute: ", "surrogate": "RuntimeError: \\ud800 lone", "interrupt": "KeyboardInterrupt: "}


@pytest.mark.parametrize("how", TOLD)
def test_what_is_hard_to_tell_is_told(how, tmp_path):
    for rank, answer in enumerate(ranks.run(3, hard_to_tell, how, folder=tmp_path, group_timeout=20, limit=60)):
        if isinstance(answer, Exception):
            raise answer
        said, after = answer
        alone_with_it = rank == 1 and how == "interrupt"
        assert said == (("KeyboardInterrupt", None) if alone_with_it else ("RankError", {1: TOLD[how]}))
        assert after <= 1e-6


def out_of_step(rank):
    """The error where rank 1 has left a call that the others are still in."""
    tower = tower_models.make("qwen2_vl", depth=1)
    if rank == 1:
        exchange.call_number(None)
    try:
        encode(tower, pixels_of(CLIP, tower), CLIP)
    except RankError as error:
        return str(error)


def test_ranks_at_different_calls(tmp_path):
    for said in ranks.run(2, out_of_step, folder=tmp_path, limit=60):
        assert "not at the same call" in said and "rank 0: call 1: 4 images" in said and "rank 1: call 2: " in said


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
