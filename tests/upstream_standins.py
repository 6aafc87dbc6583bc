"""Stand-ins for the functions that docs/upstream.md maps: their signatures, and their results by plain formulas.

Written from what those functions return, in few words; none of them calls vitkit.
"""

import torch


def _ids(h, w, m):
    """int64 (h*w, 2): row and column, by m x m blocks."""
    places = [(y + dy, x + dx) for y in range(0, h, m) for x in range(0, w, m) for dy in range(m) for dx in range(m)]
    return torch.tensor(places)


def _windows(t, h, w, m, side):
    """Merged units of one clip by windows, and the windows' lengths in patches, 0 for those beyond the edge.

    As upstream pads: by one more row and column of windows where the side divides the height and width already.
    """
    H, W, order, lengths = h // m, w // m, [], []
    for frame in range(t):
        for y in range(0, H + side - H % side, side):
            for x in range(0, W + side - W % side, side):
                rows, cols = range(y, min(y + side, H)), range(x, min(x + side, W))
                order += [frame * H * W + row * W + col for row in rows for col in cols]
                lengths.append(len(rows) * len(cols) * m * m)
    return torch.tensor(order), lengths


def _angles(ids, head_dim, theta=10000.0):
    """float32 (N, head_dim / 2): the row's angles, then the column's."""
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    return (ids[..., None] * theta**-quarter).flatten(1)


def _rotated(x, cos, sin):
    """Rotate-half in float32; cos and sin (S, D)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1).float()
    return (x.float() * cos[:, None].float() + turned * sin[:, None].float()).to(x.dtype)


# transformers


def get_vision_position_ids(grid_thw, spatial_merge_size, include_temporal=False, kwargs=None):
    return torch.cat([_ids(h, w, spatial_merge_size).repeat(t, 1) for t, h, w in grid_thw.tolist()])


def get_vision_window_index(grid_thw, spatial_merge_size, window_size, patch_size, kwargs=None):
    m, order, ends, first = spatial_merge_size, [], [0], 0
    for t, h, w in grid_thw.tolist():
        units, lengths = _windows(t, h, w, m, window_size // m // patch_size)
        order.append(units + first)
        first += len(units)
        ends += (torch.tensor(lengths).cumsum(0) + ends[-1]).tolist()
    return torch.cat(order), torch.unique_consecutive(torch.tensor(ends, dtype=torch.int32))


def get_vision_cu_seqlens(grid_thw, merge_temporal=False, kwargs=None):
    lengths = [n for t, h, w in grid_thw.tolist() for n in ([t * h * w] if merge_temporal else [h * w] * t)]
    return torch.tensor([0, *lengths]).cumsum(0).int()


def apply_rotary_pos_emb_vision(q, k, cos, sin):
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


# vLLM


def rotary_pos_emb_thw(self, t, h, w):
    angles = _angles(_ids(h, w, self.spatial_merge_size).repeat(t, 1), self.head_dim)
    return tuple(x.to(self.dtype).unflatten(0, (-1, self.spatial_merge_unit)) for x in (angles.cos(), angles.sin()))


def get_window_index_thw(self, grid_t, grid_h, grid_w):
    order, lengths = _windows(grid_t, grid_h, grid_w, self.spatial_merge_size, self.side)
    return order, torch.unique_consecutive(torch.tensor(lengths).cumsum(0).int())


def get_rope_by_thw(self, t, h, w):
    order, ends = get_window_index_thw(self, t, h, w)
    cos, sin = (x[order].flatten(0, 1) for x in rotary_pos_emb_thw(self, t, h, w))
    return cos, sin, order, ends, torch.tensor([h * w] * t, dtype=torch.int32)


def prepare_encoder_metadata(self, grid_thw):
    parts = [get_rope_by_thw(self, *row) for row in grid_thw]
    order, ends, units = [], [torch.zeros(1, dtype=torch.int32)], 0
    for _, _, index, window_ends, _ in parts:
        order.append(index + units)
        units += len(index)
        ends.append(window_ends + ends[-1][-1])
    order, ends = torch.cat(order), torch.cat(ends)
    frames = torch.nn.functional.pad(torch.cat([part[4] for part in parts]).cumsum(0), (1, 0)).int()
    return {
        "rotary_pos_emb_cos": torch.cat([part[0] for part in parts]),
        "rotary_pos_emb_sin": torch.cat([part[1] for part in parts]),
        "window_index": order,
        "reverse_indices": torch.argsort(order),
        "cu_seqlens": frames,
        "cu_window_seqlens": ends,
        "max_seqlen_full": frames.diff().max(),
        "max_seqlen_window": ends.diff().max(),
    }


def rotate_qkv(qkv, rotary_pos_emb_cos, rotary_pos_emb_sin):
    cos, sin = (torch.cat([x, x], dim=-1) for x in (rotary_pos_emb_cos, rotary_pos_emb_sin))
    q, k, v = qkv.unbind(dim=2)
    return _rotated(q[0], cos, sin)[None], _rotated(k[0], cos, sin)[None], v


# SGLang


def rot_pos_ids(h, w, spatial_merge_size):
    return _ids(h, w, spatial_merge_size)


def get_window_index(self, grid_thw):
    """With the repeats of empty windows; `forward` then removes them."""
    order, ends, units = [], [0], 0
    for t, h, w in grid_thw.tolist():
        index, lengths = _windows(t, h, w, self.spatial_merge_size, self.side)
        order.append(index + units)
        units += len(index)
        ends += (torch.tensor(lengths).cumsum(0) + ends[-1]).tolist()
    return torch.cat(order), ends


def permute_inv_of(self, grid_thw):
    return torch.argsort(get_window_index(self, grid_thw)[0])


def position_embeddings(self, grid_thw):
    ids = torch.cat([_ids(h, w, self.spatial_merge_size).repeat(t, 1) for t, h, w in grid_thw.tolist()])
    angles = _angles(ids, self.head_dim).to(self.dtype)
    angles = angles.unflatten(0, (-1, self.spatial_merge_unit))[get_window_index(self, grid_thw)[0]].flatten(0, 1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def full_cu_seqlens(self, grid_thw):
    return torch.cat([torch.zeros(2, dtype=torch.int64), grid_thw.prod(-1).cumsum(0)]).int()


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return _rotated(q, cos, sin), _rotated(k, cos, sin)
