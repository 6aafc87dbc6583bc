"""A forward pass of transformers' Qwen2.5-VL vision tower, with its own index tensors and with those of a plan.

Random weights: traffic and time do not depend on them. On a GPU the published dimensions in bfloat16, on a CPU a
narrow tower of two layers in float32.
"""

from contextlib import contextmanager

import torch

from ..plan import VisionPlan
from . import plan_cases, traffic
from .cases import tokens
from .timing import _said

PUBLISHED = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
NARROW = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64}
# "flash" in its name makes the tower hand cu_seqlens over whole; with "sdpa" each layer reads them back and splits.
VARLEN = "vitkit_flash_varlen"
SDPA_PATCHES = 13_000  # with 28 layers of windows that is 7,000 calls of the attention, all in the profiler's trace


def make_tower(geometry, device, **dimensions):
    """A tower for `geometry`, ready for inference, on `device`. dimensions: of its config, instead of the usual."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    on_gpu = torch.device(device).type == "cuda"
    dimensions = (PUBLISHED if on_gpu else NARROW) | dimensions
    full = [7, 15, 23, 31] if dimensions["depth"] == 32 else [dimensions["depth"] - 1]
    config = Qwen2_5_VLVisionConfig(
        **dimensions,
        fullatt_block_indexes=full,
        patch_size=geometry.patch_size,
        spatial_merge_size=geometry.spatial_merge_size,
        window_size=geometry.window_size,
    )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)  # not .to(): the frequencies stay float32
    try:
        with torch.device(device):
            return Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    finally:
        torch.set_default_dtype(before)


def pixels(grid, tower) -> torch.Tensor:
    """Random patches (N, channels * frames * patch_size^2) in the dtype of the tower's weights, on its device."""
    weight, config = tower.patch_embed.proj.weight, tower.config
    generator = torch.Generator(weight.device).manual_seed(0)
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.randn(tokens(grid), width, generator=generator, dtype=weight.dtype, device=weight.device)


def forwards(tower, grid, geometry, device) -> dict:
    """{"transformers" or "plan": callable() -> the merged units (U, out_hidden_size)}.

    transformers has its grid on the device. The plan is built from a grid on the CPU, in the call, and the tower gets
    that grid too, which it does not look at: everything that it would compute from it is in `plan.model_kwargs()`.
    """
    x, on_cpu = pixels(grid, tower), torch.tensor(grid)
    on_device, device = on_cpu.to(device), str(device)

    @torch.no_grad()
    def with_plan():
        plan = VisionPlan.from_grid(on_cpu, geometry, device=device)
        return _merged(tower(x, grid_thw=on_cpu, **plan.model_kwargs()))

    @torch.no_grad()
    def without():
        return _merged(tower(x, grid_thw=on_device))

    return {"transformers": without, "plan": with_plan}


def _merged(output):
    """What the language model gets; older versions of transformers return it alone."""
    return getattr(output, "pooler_output", output)


@contextmanager
def attention(tower, name):
    """The tower with "sdpa", or with "varlen": torch's attention over sequences of different lengths (GPU only)."""
    before = tower.config._attn_implementation
    if name == "varlen":
        _register_varlen()
    tower.config._attn_implementation = VARLEN if name == "varlen" else name
    try:
        yield tower
    finally:
        tower.config._attn_implementation = before


def _register_varlen():
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface

    def forward(module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **_):
        """q, k, v (1, H, S, D) -> (1, S, H, D), without a mask; the scale is the usual 1 / sqrt(D)."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        cu, longest = cu_seq_lens_q, int(max_length_q)
        return varlen_attn(q, k, v, cu, cu, longest, longest).unsqueeze(0), None

    AttentionInterface.register(VARLEN, forward)


def forward_rows(grids, geometry, device, tower=None):
    """Yields (case, version, metric, value, unit): the traffic of both forwards, and how far their results differ.

    On a GPU with varlen, and with sdpa single images and clips, whose waits are the same for any number; on a CPU with
    sdpa up to SDPA_PATCHES. What fails is a row with the metric "failed: ..." and no value.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    try:
        tower = make_tower(geometry, device) if tower is None else tower
    except Exception as error:  # transformers is not installed, or another version
        yield grids[0][0], "forward", f"failed: {_said(error)}", None, ""
        return
    for name, grid in grids:
        small = tokens(grid) <= SDPA_PATCHES and not (on_gpu and len(grid) > 1)
        for kind in ["sdpa"] * small + ["varlen"] * on_gpu:
            yield from _pair(name, grid, kind, geometry, device, tower)
        if on_gpu:
            torch.cuda.empty_cache()  # the activations of another size are of no use to the next


def _pair(name, grid, kind, geometry, device, tower):
    try:
        with attention(tower, kind):
            outputs, needs = {}, _needs(grid, geometry, device)
            for version, call in forwards(tower, grid, geometry, device).items():
                label = f"forward {kind}: {version}"
                rows, outputs[version] = traffic.counted(name, label, call, device, needs=needs[version], warmup=1)
                yield from rows
    except Exception as error:  # torch may have no such attention, transformers another interface
        yield name, f"forward {kind}", f"failed: {_said(error)}", None, ""
        return
    if all(x is not None for x in outputs.values()):
        ours, theirs = outputs["plan"].float(), outputs["transformers"].float()
        yield name, f"forward {kind}: plan", "largest difference of the outputs", (ours - theirs).abs().max().item(), ""


def _needs(grid, geometry, device) -> dict:
    """{version: callable(outputs) -> {name: tensor}}: the index tensors of a forward; asked for on a CPU alone."""
    table = torch.tensor(grid)
    theirs = plan_cases.plan_peers(geometry, device).get("transformers")
    return {
        "transformers": lambda _: theirs(table, table),
        "plan": lambda _: plan_cases.ready(VisionPlan.from_grid(table, geometry)),
    }
