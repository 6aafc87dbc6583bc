"""What ranks tell one another: how each fared, in one message of fixed size, and then everybody's rows.

torch.distributed as it is: gloo between CPUs, NCCL or RCCL between GPUs.
"""

import hashlib
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

MESSAGE = 512  # bytes: 1 (0 if the rank failed), 32 of a sha256, and text in UTF-8, filled up with zeros


class RankError(RuntimeError):
    """Raised on every rank of a group when one of them could not do its part, or was asked for something else.

    failures: {rank in the group: cause}, of the ranks that failed; empty where arguments differ.
    On a rank that failed, `__cause__` is the exception itself.
    """

    def __init__(self, text, failures):
        super().__init__(text)
        self.failures = failures


def place(group) -> tuple[int, int]:
    """(this process's rank in the group, its size); RuntimeError or ValueError where there is no such group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has no process group: call torch.distributed.init_process_group on every rank first "
            "(under torchrun it takes rank and size from the environment)"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group={group!r}: a group that holds this process (rank {dist.get_rank()}) is allowed")
    return rank, dist.get_world_size(group)


def call_number(group) -> int:
    """How many calls the group has begun on this rank, with this one.

    A rank that left a call before the others met it there (interrupted while it waited, say) would answer their call
    with its next one: the numbers, which are part of what all must have in common, make that an error.
    """
    group = dist.group.WORLD if group is None else group
    _calls[group] = _calls.get(group, 0) + 1
    return _calls[group]


_calls = WeakKeyDictionary()


def digest(*what) -> bytes:
    """sha256 of plain values, by their repr: the same on every machine."""
    return hashlib.sha256(repr(what).encode()).digest()


def agree(group, own: bytes, text: str, error: BaseException | None, device) -> None:
    """Every rank tells every other how it fared; RankError on all of them if one failed or their digests differ.
    What is no Exception (KeyboardInterrupt, say) is told to the others as well, and raised as it is where it came from.

    own: 32 bytes of what all must have in common; text: the same for people. error: what this rank failed with, or
    None. device: a tensor there can be sent. Reading the answers waits for the device, as for every rank.
    """
    rank, world = place(group)
    if error is not None:
        text = f"{type(error).__name__}: {' '.join(_text_of(error).split())}"
    data = bytes([error is None]) + own + text.encode(errors="backslashreplace")
    message = torch.tensor(list(data[:MESSAGE].ljust(MESSAGE, b"\0")), dtype=torch.uint8).to(device)
    answers = torch.empty(world, MESSAGE, dtype=torch.uint8, device=device)
    _told(dist.all_gather, list(answers.unbind()), message, group=group)
    answers = [bytes(row) for row in answers.tolist()]
    texts = [answer[33:].rstrip(b"\0").decode(errors="ignore") for answer in answers]
    failures = {r: texts[r] for r in range(world) if not answers[r][0]}
    if error is not None and not isinstance(error, Exception):
        raise error
    if failures:
        said = "; ".join(f"rank {r} of {world} failed: {cause}" for r, cause in failures.items())
        raise RankError(said, failures) from error
    if len({answer[1:33] for answer in answers}) > 1:
        said = "; ".join(f"rank {r}: {texts[r]}" for r in range(world))
        raise RankError(
            "the ranks were called with different grids or towers, or are not at the same call; the same are allowed "
            f"(once out of step, a new group is needed): {said}",
            {},
        )


def _text_of(error) -> str:
    """str(error), or where that raises nothing: a rank that could not tell would leave the others waiting."""
    try:
        return str(error)
    except Exception:
        return ""


def gather_rows(rows, counts, group) -> None:
    """Fills in the other ranks' rows, in place. rows: contiguous (sum of counts, C), with this rank's own in place;
    counts: of every rank's rows, one rank after the other, the same list on every rank.

    A broadcast from each rank that has rows, all under way at once: exactly those rows move, without padding, as bytes,
    for a backend may not know a dtype.
    """
    works, start, data = [], 0, rows.view(torch.uint8)
    for rank, n in enumerate(counts):
        if n:
            part = data[start : start + n]
            works.append(_told(dist.broadcast, part, group=group, group_src=rank, async_op=True))
        start += n
    for work in works:
        _told(work.wait)


def sends_from(group, device) -> torch.device:
    """Where tensors of `device` are sent from: there, or where the group reaches no such device (or by gloo alone,
    which takes them through the CPU anyway) the CPU; ValueError where neither can be."""
    device, backends = torch.device(device), _backends(group)
    if backends.get(device.type, "gloo") != "gloo":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    raise ValueError(f"tower on {device}: one on {' or '.join(backends)} is allowed in a group of {backends}")


def status_device(group, device) -> torch.device:
    """Where `agree` may have its message: the CPU if the group reaches it, else the rank's GPU."""
    backends = _backends(group)
    if "cpu" in backends:
        return torch.device("cpu")
    if device is not None and device.type in backends:
        return device
    kind = next(iter(backends))
    return torch.device(kind, getattr(torch, kind).current_device())


def _backends(group) -> dict:
    """{type of device: backend}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def _told(call, *args, **kwargs):
    """`call(...)`; what fails in it is another rank's end or the network, and the message says so."""
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(f"the exchange with the other ranks failed (has one of them ended?): {error}") from error
