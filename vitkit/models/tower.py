"""An accelerated tower: whose `forward`s are exchanged, for what, and when the parts step aside."""

import types
import warnings
from functools import partial
from importlib import import_module

import torch

from ..geometry import Geometry
from ..indices import _installed
from ..plan import VisionPlan
from ..rotary import rotary_table
from . import mlp as padding
from .attention import NAMES, exchange, rotate, runs_of, varlen_serves
from .graphs import Graphs, has_hooks, wait_once

TRANSFORMERS = (5, 17)  # the first version whose towers take their index tensors as keyword arguments
TOWERS = {
    "Qwen2VisionTransformerPretrainedModel": "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "Qwen2_5_VisionTransformerPretrainedModel": "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
}
FUSED_DTYPES = (torch.bfloat16, torch.float16)  # of q, k and v that windows are attended to in one launch
FUSED_ON = ("cuda",)  # types of devices on which the kernels of `norms` run
# What a caller may have computed himself; then it is his that counts.
INDEX_TENSORS = frozenset(
    ("position_ids", "cu_seqlens", "max_seqlen", "window_index", "cu_window_seqlens", "max_window_seqlen")
)


def check_tower(tower):
    """ValueError unless it is one of TOWERS, of a version of transformers that this code knows."""
    allowed = f"a {' or '.join(TOWERS)} of transformers {'.'.join(map(str, TRANSFORMERS))} or later is allowed"
    cls = type(tower)
    if TOWERS.get(cls.__name__) != cls.__module__:
        inside = " (pass the vision tower of a model: its .visual)" if hasattr(tower, "get_image_features") else ""
        raise ValueError(f"tower is a {cls.__module__}.{cls.__qualname__}: {allowed}{inside}")
    version = import_module("transformers").__version__
    if tuple(int(x) for x in version.split(".")[:2]) < TRANSFORMERS:
        raise ValueError(f"transformers is {version}: {allowed}")


def accelerated(tower):
    """The `Accelerated` that a tower runs through, or None."""
    found = getattr(getattr(tower, "__dict__", {}).get("forward"), "__self__", None)
    return found if isinstance(found, Accelerated) else None


def modules(tower):
    """The modules whose forward may be exchanged."""
    return [tower, tower.patch_embed, *(m for block in tower.blocks for m in (block, block.attn, block.mlp))]


class Accelerated:
    """A tower and what it runs through: `apply` exchanges forwards, `undo` takes them back.

    Everything hangs on bound methods of this object and of the modules, so that a deep copy of an accelerated tower is
    an accelerated tower of its own.
    """

    def __init__(self, tower, parts):
        self.tower, self.parts = tower, parts
        self.geometry = Geometry.from_config(tower.config)
        self.output_class = import_module("transformers.modeling_outputs").BaseModelOutputWithPooling
        self.padded, self.tables, self.warned, self.graphs = {}, [], set(), Graphs(self._run)

    def apply(self):
        tower = self.tower
        names = self._exchanged_names()
        attention = exchange(type(tower.blocks[0].attn).forward, names) if names else None
        for block in tower.blocks:
            if attention:
                block.attn.forward = types.MethodType(attention, block.attn)
            if self.parts & {"mlp", "norms"}:
                block.mlp.forward = partial(self._mlp, block.mlp)
            if "norms" in self.parts:
                block.forward = partial(self._block, block)
        if "embed" in self.parts:
            tower.patch_embed.forward = self._embed
        tower.forward, self.applied = self.forward, True
        return self

    def undo(self):
        self.applied = False
        for module in modules(self.tower):
            module.__dict__.pop("forward", None)
        for padded in self.padded.values():
            padded.release()
        self.padded, self.tables = {}, []
        self.graphs.clear()

    def _exchanged_names(self) -> dict:
        out = {}
        if "rotary" in self.parts:
            out["apply_rotary_pos_emb_vision"] = rotate
        if "attention" in self.parts:
            out |= NAMES
        return out

    # ---- the forwards -----------------------------------------------------------------------------------------------

    def forward(self, hidden_states, grid_thw, **kwargs):
        """As the tower's own: pixels (N, channels * frames * patch_size^2), grid_thw (G, 3) -> its output class."""
        original = partial(type(self.tower).forward, self.tower)
        if torch.compiler.is_compiling():  # theirs computes index tensors where the grid is
            if isinstance(grid_thw, torch.Tensor):
                grid_thw = grid_thw.to(hidden_states.device)
            return original(hidden_states, grid_thw, **kwargs)
        recorded = _recorded(hidden_states, self.tower)
        if recorded:
            why = "gradients are recorded; torch.no_grad() brings back"
            self._aside(self.parts & {"windows", "mlp", "norms", "graph"}, why)
        if "plan" not in self.parts or INDEX_TENSORS & kwargs.keys():
            return original(hidden_states, grid_thw, **kwargs)
        grid, device = self._on_cpu(grid_thw), hidden_states.device
        if device != self.tower.patch_embed.proj.weight.device or not self._plain(kwargs):
            plan = VisionPlan.from_grid(grid, self.geometry, device=device)
            return original(hidden_states, grid, **plan.model_kwargs(), **kwargs)
        outputs = None
        if "graph" in self.parts and not recorded:
            outputs = self.graphs(hidden_states, grid, self.geometry, self.tower)
        if outputs is None:
            outputs = self._run(hidden_states, VisionPlan.from_grid(grid, self.geometry, device=device))
        return self.output_class(last_hidden_state=outputs[0], pooler_output=outputs[1])

    def _run(self, pixels, plan):
        """The tower on a plan's index tensors: (hidden states in window order, merged units in image order)."""
        tower, windows = self.tower, self.geometry.window
        x = tower.patch_embed(pixels)
        if len(x) != len(plan.window_pos_ids):
            raise ValueError(f"hidden_states has {len(x)} patches: grid_thw has {len(plan.window_pos_ids)}")
        if windows:
            x = x.view(len(plan.window_index), -1).index_select(0, plan.window_index).view(x.shape)
        positions, runs = self._cos_sin(plan), self._runs(plan, x)
        fused = not _recorded(x, tower) and not any(map(has_hooks, tower.blocks))
        fused = fused and all(self._fused(x, norm) for block in tower.blocks for norm in (block.norm1, block.norm2))
        in_one = self._rotates_in_attention(x)
        added = None  # what is to be added to x, and is in the next norm
        for i, block in enumerate(tower.blocks):
            whole = not windows or i in tower.fullatt_block_indexes
            offsets, longest = plan.cu_seqlens, plan.max_seqlen
            if not whole:
                offsets, longest = plan.cu_window_seqlens, plan.max_window_seqlen
            options = {"cu_seqlens": offsets, "max_seqlen": longest, "position_embeddings": positions, **runs[whole]}
            if not whole and in_one:  # the attention rotates as well
                options |= {"position_embeddings": (None, None), "angles": positions}
            if fused:
                x, added = self._layer(block, x, added, **options)
            else:
                x = block(x, **options)
        x = x if added is None else x + added
        merged = tower.merger(x)
        return x, merged.index_select(0, plan.reverse_index) if windows else merged

    def _rotates_in_attention(self, x) -> bool:
        """Whether windows are rotated and attended to in one launch, where autograd records nothing."""
        if "windows" not in self.parts or not self.geometry.window or not _installed("triton"):
            return False
        watched = any(has_hooks(m) for block in self.tower.blocks for m in (block.attn, block.attn.qkv))
        return x.device.type in FUSED_ON and x.dtype in FUSED_DTYPES and not watched and not _recorded(x, self.tower)

    def _runs(self, plan, x) -> dict:
        """{whole frames or windows: keywords of `attend`}: runs of segments, where its calls go by them."""
        if "attention" not in self.parts or varlen_serves(x.device, x.dtype, self.geometry.head_dim):
            return {True: {}, False: {}}
        plan = plan.to("cpu")
        return {True: {"runs": runs_of(plan.cu_seqlens)}, False: {"runs": runs_of(plan.cu_window_seqlens)}}

    def _cos_sin(self, plan):
        """Two float32 (N, D): a row of the table for every patch, doubled as the tower's own rotation takes it."""
        fits = [x for x in self.tables if x.device == plan.device and x.shape[1] > plan.max_position]
        if not fits:
            rows = 1 << max(plan.max_position, 255).bit_length()  # doubled, so few are ever made
            with torch.inference_mode(False):  # a training step may follow
                fits = [rotary_table(self.geometry, rows - 1, device=plan.device)]
            wait_once(plan.device)
            self.tables += fits  # the smaller ones stay: graphs read them
        return tuple(half[plan.window_pos_ids].flatten(1).repeat(1, 2) for half in fits[0])

    def _layer(self, block, x, added, **options):
        """A block of which each residual sum is taken in the launch of the norm after it: (x, what to add to it)."""
        x, normed = (x, _norm(block.norm1, x)) if added is None else _norm(block.norm1, x, added)
        x, normed = _norm(block.norm2, x, block.attn(normed, **options))
        return x, block.mlp(normed)

    def _block(self, block, hidden_states, *args, **kwargs):
        fused = all(self._fused(hidden_states, norm) for norm in (block.norm1, block.norm2))
        if args or not fused or _recorded(hidden_states, block):
            return type(block).forward(block, hidden_states, *args, **kwargs)
        x, added = self._layer(block, hidden_states, None, **kwargs)
        return x + added

    def _embed(self, hidden_states):
        """The convolution of patches that do not overlap, as the product that it is: pixels (N, K) -> (N, C)."""
        layer = self.tower.patch_embed
        if not _is(layer.proj, "Conv3d") or layer.proj.bias is not None:
            return type(layer).forward(layer, hidden_states)
        weight = layer.proj.weight
        weight = weight.reshape(len(weight), -1)
        return torch.nn.functional.linear(hidden_states.to(weight.dtype).reshape(-1, weight.shape[1]), weight)

    def _mlp(self, mlp, x):
        if torch.compiler.is_compiling() or _recorded(x, mlp):
            return type(mlp).forward(mlp, x)
        hooked = any(map(has_hooks, mlp.children()))  # what they see is not made below
        fused = self._serves(x, mlp) and not hooked
        if "mlp" in self.parts and padding.serves(mlp) and not hooked:
            padded = self.padded.get(mlp)
            if padded is None or not padded.whole():
                padded = self.padded[mlp] = padding.Padded(mlp)
            x = padded.hidden(x)
            if fused and _is(mlp.act_fn, "SiLUActivation", "SiLU"):
                x = _kernels().swiglu(x)
            else:
                gate, up = x.chunk(2, dim=-1)
                x = mlp.act_fn(gate) * up
            return torch.nn.functional.linear(x, padded.down, mlp.down_proj.bias)
        if fused and hasattr(mlp, "fc1") and _is(mlp.act, "QuickGELUActivation"):
            return mlp.fc2(_kernels().quick_gelu_(mlp.fc1(x)))
        return type(mlp).forward(mlp, x)

    # ---- when what serves -------------------------------------------------------------------------------------------

    def _plain(self, kwargs) -> bool:
        """Whether nothing is asked for but the two usual outputs."""
        config = self.tower.config
        asked = [k for k, v in kwargs.items() if v is not None and v is not False and (k, v) != ("return_dict", True)]
        more = config.output_hidden_states or config.output_attentions or not config.return_dict
        return not asked and kwargs.get("return_dict") is not False and not more

    def _fused(self, x, norm) -> bool:
        return _is(norm, "LayerNorm", "Qwen2_5_VLRMSNorm") and self._serves(x, norm)

    def _serves(self, x, module) -> bool:
        """Whether the kernels of `norms` serve x and this module's weights, where autograd records nothing."""
        weight = next(module.parameters(), None)
        if "norms" not in self.parts or torch.compiler.is_compiling() or not _installed("triton") or weight is None:
            return False
        return x.device.type in FUSED_ON and x.dim() == 2 and x.is_contiguous() and x.dtype == weight.dtype

    def _on_cpu(self, grid_thw):
        if isinstance(grid_thw, torch.Tensor) and grid_thw.is_cuda:
            self._warn("grid_thw lies on a GPU: reading it back waits for everything queued there; keep it on the CPU")
            return grid_thw.cpu()
        return grid_thw

    def _aside(self, parts, why):
        if parts:
            self._warn(f"{why} {', '.join(sorted(parts))}")

    def _warn(self, text):
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=5)


def _kernels():
    from . import triton_kernels

    return triton_kernels


def _recorded(x, module) -> bool:
    """Whether autograd records what the module makes of x."""
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters()))


def _norm(module, x, residual=None):
    if residual is not None:  # a hook may have returned something else than the kernel takes
        residual = residual.expand_as(x).contiguous()
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return _kernels().norm(x, module.weight, getattr(module, "bias", None), eps, residual)


def _is(module, *names) -> bool:
    """Whether a module is of one of these classes, and nothing hangs on its forward."""
    return type(module).__name__ in names and "forward" not in module.__dict__ and not has_hooks(module)
