"""Small towers of transformers with random weights, for tests; norms and biases too, which are 1 and 0 at first."""

import pytest
import torch

import vitkit

pytest.importorskip("transformers")

from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

KINDS = ("qwen2_5_vl", "qwen2_vl")
ALL = ("plan", "embed", "rotary", "attention", "windows", "mlp", "norms")  # every part but graph
GRIDS = ([[1, 8, 8]], [[1, 18, 22], [3, 10, 14]], [[2, 4, 6], [1, 2, 2], [1, 30, 8]])


def make(kind, dtype=torch.float32, device="cpu", depth=3):
    torch.manual_seed(1)
    if kind == "qwen2_5_vl":
        sizes = {"hidden_size": 64, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 48}
        config = Qwen2_5_VLVisionConfig(depth=depth, fullatt_block_indexes=[depth - 1], **sizes)
        cls = Qwen2_5_VisionTransformerPretrainedModel
    else:
        config = Qwen2VLVisionConfig(depth=depth, embed_dim=64, hidden_size=48, num_heads=2, mlp_ratio=2)
        cls = Qwen2VisionTransformerPretrainedModel
    config._attn_implementation = "sdpa"
    tower = cls(config).eval()
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name or "ln_q" in name))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
    inv_freq = tower.rotary_pos_emb.inv_freq
    tower = tower.to(device=device, dtype=dtype)
    tower.rotary_pos_emb.inv_freq = inv_freq.to(device)
    return tower


def batch(grid, tower, seed=0):
    """(pixels, grid on the CPU)."""
    weight, grid = tower.patch_embed.proj.weight, torch.tensor(grid)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(int(grid.prod(1).sum()), weight[0].numel(), generator=generator)
    return pixels.to(weight.device, weight.dtype), grid


def outputs(tower, pixels, grid, **options):
    out = tower(pixels, grid_thw=grid, **options)
    return out.last_hidden_state, out.pooler_output


def error(mine, exact):
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(mine, exact))


def accelerate(tower, parts=ALL):
    return vitkit.accelerate(tower, parts)
