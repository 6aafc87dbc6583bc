"""transformers' vision towers of Qwen2-VL and Qwen2.5-VL, made faster in place: `accelerate` and `accelerate_`.

The tower stays the module that it was: its class, its weights and their names, what it takes and what it returns.
What is exchanged are the `forward` of the tower and of some of its parts, as attributes of these very modules.
"""

from contextlib import contextmanager

from .tower import Accelerated, accelerated, check_tower, modules

# Names of the parts, in the order in which a forward pass meets them.
PARTS = ("plan", "embed", "rotary", "attention", "windows", "mlp", "norms", "graph")
CPU_PARTS = ("plan", "embed", "rotary", "attention")


@contextmanager
def accelerate(tower, parts="auto"):
    """The same tower, accelerated until the block is left: `with vitkit.accelerate(model.visual) as fast: fast(...)`.

    tower: a Qwen2VisionTransformerPretrainedModel or a Qwen2_5_VisionTransformerPretrainedModel of transformers 5.17
    or later, alone or inside its model. parts: "auto", all that help on the tower's device, or some of

        plan        index tensors from one upload (`VisionPlan`), without a wait for the GPU; wants the grid on the CPU
        embed       the convolution of the patches as one matrix product
        rotary      q and k rotated in one launch
        attention   torch's variable-length attention (16-bit, on a GPU), or one call a run of equal segments
        windows     rotation and attention of a window in one launch (16-bit, on a GPU); needs plan, rotary, attention
        mlp         gate and up in one product at a width padded with zeros to a multiple of 8 (Qwen2.5-VL)
        norms       residual sum and norm in one launch, and the MLP's activation in one (GPU)
        graph       CUDA graphs by token budget, up to `graphs.MAX_TOKENS` patches; needs plan and attention

    Angles follow the tower's config. With `mlp` a down_proj.weight is no contiguous tensor: `save_pretrained` and
    `torch.save` take it, safetensors' `save_file` after `.contiguous()`.

    Where gradients are recorded, windows, mlp, norms and graph step aside, with a warning once. ValueError names what
    is not allowed, a tower or a part, before anything is changed.
    """
    mine = _apply(tower, parts)
    try:
        yield tower
    finally:
        if mine.applied:  # also where its forward was wrapped meanwhile: what is left is the tower as it was
            mine.undo()


def accelerate_(tower, parts="auto"):
    """The same tower, accelerated from now on, as in `accelerate`; `restore_` undoes it."""
    _apply(tower, parts)
    return tower


def restore_(tower):
    """The same tower as it was before `accelerate_`; a tower that is not accelerated stays as it is."""
    found = accelerated(tower)
    if found is not None:
        found.undo()
    return tower


def _apply(tower, parts):
    check_tower(tower)
    if accelerated(tower) is not None:
        raise ValueError("tower is accelerated already; vitkit.models.restore_(tower) makes it as it was")
    for module in modules(tower):
        if "forward" in module.__dict__:
            raise ValueError(
                f"tower: a {type(module).__name__} in it has a forward of its own, from something else that patches it "
                "(device_map, say); one without is allowed"
            )
    return Accelerated(tower, _check_parts(tower, parts)).apply()


def _check_parts(tower, parts) -> frozenset:
    if isinstance(parts, str):
        if parts != "auto":
            raise ValueError(f"parts={parts!r}: 'auto' or an iterable of {', '.join(PARTS)} is allowed")
        on_gpu = next(tower.parameters()).is_cuda
        return frozenset(PARTS if on_gpu else CPU_PARTS)
    try:
        chosen = frozenset(parts)
    except TypeError:
        chosen = frozenset([parts])
    if not chosen <= set(PARTS):
        unknown = sorted(map(repr, chosen - set(PARTS)))
        raise ValueError(f"parts holds {', '.join(unknown)}: 'auto' or an iterable of {', '.join(PARTS)} is allowed")
    for part, needs in (("graph", ("plan", "attention")), ("windows", ("plan", "rotary", "attention"))):
        if part in chosen and not set(needs) <= chosen:
            raise ValueError(f"parts={sorted(chosen)}: {part} is allowed together with {' and '.join(needs)} alone")
    return chosen
