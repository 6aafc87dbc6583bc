"""The vision towers of Qwen2-VL and Qwen2.5-VL that the notebooks run, and a forward with the index tensors of a plan.

Random weights, for time and traffic do not depend on them, or those of a checkpoint. On a GPU the published dimensions
in bfloat16, on a CPU a narrow tower of two layers in float32.
"""

from contextlib import contextmanager
from importlib import import_module

import torch

from ..geometry import Geometry
from ..plan import VisionPlan
from . import plan_cases, traffic
from .cases import tokens
from .timing import _said

PUBLISHED = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
NARROW = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64}
# Qwen2-VL calls its width embed_dim, and the language model's hidden_size.
PUBLISHED_QWEN2 = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 3584}
NARROW_QWEN2 = {"depth": 2, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 64}
TOWERS = {
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
}
# "flash" in its name makes the tower hand cu_seqlens over whole; with "sdpa" each layer reads them back and splits.
VARLEN = "vitkit_flash_varlen"
SDPA_PATCHES = 13_000  # with 28 layers of windows that is 7,000 calls of the attention, all in the profiler's trace


def make_tower(geometry, device, **dimensions):
    """A tower with random weights for `geometry`, ready for inference: Qwen2.5-VL's, or without windows Qwen2-VL's.

    dimensions: of its config, instead of the usual. In bfloat16 on a GPU, else in float32.
    """
    name = "qwen2_5_vl" if geometry.window else "qwen2_vl"
    config_name, tower_name = TOWERS[name]
    folder = f"transformers.models.{name}"
    config_class = getattr(import_module(f"{folder}.configuration_{name}"), config_name)
    tower_class = getattr(import_module(f"{folder}.modeling_{name}"), tower_name)
    on_gpu = torch.device(device).type == "cuda"
    if geometry.window:
        dimensions = (PUBLISHED if on_gpu else NARROW) | dimensions
        full = [7, 15, 23, 31] if dimensions["depth"] == 32 else [dimensions["depth"] - 1]
        dimensions |= {"fullatt_block_indexes": full, "window_size": geometry.window_size}
    else:
        dimensions = (PUBLISHED_QWEN2 if on_gpu else NARROW_QWEN2) | dimensions
    dimensions |= {"patch_size": geometry.patch_size, "spatial_merge_size": geometry.spatial_merge_size}
    config = config_class(**dimensions)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(device))  # not .to(): the frequencies stay float32
    try:
        with torch.device(device):
            return tower_class(config).eval()
    finally:
        torch.set_default_dtype(before)


def load_tower(model: str, device):
    """The vision tower of a checkpoint, ready for inference on `device`, in bfloat16 on a GPU, else in float32.

    model: a local folder, or a name on Hugging Face's hub, of a whole Qwen2-VL or Qwen2.5-VL; ValueError for another
    kind of model, before its weights are read.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind = AutoConfig.from_pretrained(model).model_type
    if kind not in TOWERS:
        raise ValueError(f"model={model!r} is a {kind}: a checkpoint of {' or '.join(TOWERS)} is allowed")
    options = {"dtype": _dtype(device), "attn_implementation": "sdpa"}
    whole = AutoModelForImageTextToText.from_pretrained(model, **options)
    tower = getattr(whole, "model", whole).visual
    tower_name(tower)
    return tower.eval().to(device)


def make_towers(which: str, model: str, device) -> dict:
    """{name: tower}: of the checkpoint `model`, or if that is "" with random weights, on a CPU with four layers.

    which: a key of TOWERS or "both"; with a checkpoint the tower is its own.
    """
    if which not in (*TOWERS, "both"):
        raise ValueError(f"tower={which!r}: one of {', '.join(TOWERS)} and both is allowed")
    if model:
        tower = load_tower(model, device)
        return {tower_name(tower): tower}
    depth = {} if torch.device(device).type == "cuda" else {"depth": 4}
    names = TOWERS if which == "both" else [which]
    return {name: make_tower(getattr(Geometry, name)(), device, **depth) for name in names}


def tower_name(tower) -> str:
    """The key of TOWERS whose class the tower has; ValueError where there is none."""
    for name, (_, tower_class) in TOWERS.items():
        if type(tower).__name__ == tower_class:
            return name
    allowed = " or ".join(tower_class for _, tower_class in TOWERS.values())
    raise ValueError(f"tower is a {type(tower).__name__}: a {allowed} is allowed")


def _dtype(device):
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


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
        return merged(tower(x, grid_thw=on_cpu, **plan.model_kwargs()))

    @torch.no_grad()
    def without():
        return merged(tower(x, grid_thw=on_device))

    return {"transformers": without, "plan": with_plan}


def merged(output):
    """What the language model gets; older versions of transformers return it alone."""
    return getattr(output, "pooler_output", output)


@contextmanager
def attention(tower, name):
    """The tower with "sdpa", or with "varlen": torch's attention over sequences of different lengths (GPU only)."""
    before = tower.config._attn_implementation
    set_attention(tower, name)
    try:
        yield tower
    finally:
        tower.config._attn_implementation = before


def set_attention(tower, name):
    """As `attention`, from now on."""
    if name == "varlen":
        _register_varlen()
    tower.config._attn_implementation = VARLEN if name == "varlen" else name


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
        name = next(iter(grids))[0]
        yield name, "forward", f"failed: {_said(error)}", None, ""
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
            outputs, need = {}, needs(grid, geometry, device)
            for version, call in forwards(tower, grid, geometry, device).items():
                label = f"forward {kind}: {version}"
                rows, outputs[version] = traffic.counted(name, label, call, device, needs=need[version], warmup=1)
                yield from rows
    except Exception as error:  # torch may have no such attention, transformers another interface
        yield name, f"forward {kind}", f"failed: {_said(error)}", None, ""
        return
    if all(x is not None for x in outputs.values()):
        ours, theirs = outputs["plan"].float(), outputs["transformers"].float()
        yield name, f"forward {kind}: plan", "largest difference of the outputs", (ours - theirs).abs().max().item(), ""


def needs(grid, geometry, device) -> dict:
    """{"transformers" or "plan": callable(outputs) -> {name: index tensor of a forward}}; asked for on a CPU alone."""
    table = torch.tensor(grid)
    return {
        "transformers": lambda _: _theirs(table, geometry, device),
        "plan": lambda _: _ours(VisionPlan.from_grid(table, geometry)),
    }


def _ours(plan):
    return plan_cases.ready(plan) if plan.geometry.window else {"ids": plan.rot_pos_ids, "cu_seqlens": plan.cu_seqlens}


def _theirs(table, geometry, device):
    if geometry.window:
        return plan_cases.plan_peers(geometry, device)["transformers"](table, table)
    theirs = import_module("transformers.vision_utils")
    ids = theirs.get_vision_position_ids(table, geometry.spatial_merge_size)
    return {"ids": ids, "cu_seqlens": theirs.get_vision_cu_seqlens(table)}
