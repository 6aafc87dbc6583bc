"""cos and sin of the patches' angles, as rows of their own or as a table by position.

The first quarter of a head turns by row * f, the second by column * f, with f_i = rope_theta^(-2i / (head_dim/2)) (Su
et al., RoFormer, applied once an axis). Angles in float64, rounded once at the end.
"""

import torch

from ..geometry import Geometry
from .checks import INTEGER_NAMES, INTEGERS, about


def rotary_cos_sin(pos_ids: torch.Tensor, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every patch's angles: two float32 (N, head_dim/2) on the device of pos_ids.

    pos_ids: integers (N, 2), row and column. ValueError if pos_ids has another shape or dtype.
    """
    _check_geometry(geometry)
    if not isinstance(pos_ids, torch.Tensor) or pos_ids.dtype not in INTEGERS:
        raise ValueError(f"pos_ids={about(pos_ids)}: a tensor (N, 2) of {INTEGER_NAMES} is allowed")
    if pos_ids.dim() != 2 or pos_ids.shape[1] != 2:
        raise ValueError(f"pos_ids.shape={tuple(pos_ids.shape)}: (N, 2) is allowed")
    angles = (pos_ids.unsqueeze(-1) * _frequencies(geometry, pos_ids.device)).flatten(1).contiguous()
    return angles.cos().float(), angles.sin().float()


def rotary_table(geometry: Geometry, max_position: int, device="cpu") -> torch.Tensor:
    """cos and sin of every position from 0 to max_position: float32 (2, max_position + 1, head_dim/4).

    table[0, p] are the cosines of p * f and table[1, p] the sines, equal to the bit to what `rotary_cos_sin` gives a
    patch in row or column p: it depends on the model alone. ValueError unless max_position is an integer >= 0.
    """
    _check_geometry(geometry)
    if isinstance(max_position, bool) or not isinstance(max_position, int) or max_position < 0:
        raise ValueError(f"max_position={max_position!r}: an integer of at least 0 is allowed")
    positions = torch.arange(max_position + 1, device=device)
    angles = positions.unsqueeze(-1) * _frequencies(geometry, positions.device)
    return torch.stack([angles.cos().float(), angles.sin().float()])


def table_rows(pos_ids, table) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of cos and sin, (S, D/2) each, that a kernel would look up; positions beyond the table are clamped."""
    ids = pos_ids.long().clamp(0, table.shape[1] - 1)
    return table[0][ids].flatten(1).contiguous(), table[1][ids].flatten(1).contiguous()


def _check_geometry(geometry):
    if not isinstance(geometry, Geometry):
        raise ValueError(f"geometry={geometry!r}: a vitkit.Geometry is allowed")


def _frequencies(geometry, device):
    n = geometry.head_dim // 4
    return geometry.rope_theta ** -(torch.arange(n, dtype=torch.float64, device=device) / n)
