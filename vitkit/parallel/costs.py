"""What a frame costs a vision tower: the floating-point operations of its matrix products and of its attention."""

from dataclasses import dataclass
from functools import cache

from ..geometry import Geometry

# Of the published towers of Qwen2-VL and Qwen2.5-VL; with other layers the shares of the costs change little.
LAYERS, FULL_ATTENTION_LAYERS, OUT_WIDTH = 32, 4, 3584
IN_CHANNELS, FRAMES_A_PATCH = 3, 2


@dataclass(frozen=True)
class FrameCosts:
    """cost(h, w) = per_patch * h*w + full * (h*w)^2 + windowed * the sum over the windows of (patches)^2, in FLOP.

    per_patch: linear layers, patch embedding and merger. full, windowed: 4 * width for every layer of either attention
    (two products, and 2 FLOP for each pair of patches and each channel). side: of a window, in patches; 0: no windows.
    Plain ints, so that every rank computes the same costs, whatever its machine.
    """

    per_patch: int
    full: int
    windowed: int = 0
    side: int = 0

    def __call__(self, h: int, w: int) -> int:
        """FLOP of one frame of h x w patches."""
        n, side = h * w, self.side
        cost = n * self.per_patch + n * n * self.full
        if self.windowed:  # a border window is narrower, as tall as the others, and the like
            rows = h // side * side**2 + (h % side) ** 2
            cost += rows * (w // side * side**2 + (w % side) ** 2) * self.windowed
        return cost

    @classmethod
    def from_geometry(
        cls, geometry: Geometry, *, layers=LAYERS, full_layers=None, mlp_entries=None, out_width=OUT_WIDTH
    ) -> "FrameCosts":
        """Of a tower of this geometry, whose width is num_heads * head_dim.

        full_layers: layers with attention in whole frames (4 of 32 where there are windows, else all). mlp_entries:
        weights of one layer's MLP (with windows 3 matrices of width x 2.67 width, else 2 of width x 4 width, as both
        published models have them: 8 width^2 either way). out_width: of the language model.
        """
        width, m2 = geometry.num_heads * geometry.head_dim, geometry.spatial_merge_size**2
        mlp_entries = 8 * width**2 if mlp_entries is None else mlp_entries
        if full_layers is None:
            full_layers = max(1, layers * FULL_ATTENTION_LAYERS // LAYERS) if geometry.window else layers
        embed = IN_CHANNELS * FRAMES_A_PATCH * geometry.patch_size**2 * width
        merger = m2 * width**2 + width * out_width  # a unit's two matrices, over its m^2 patches
        return cls(
            per_patch=2 * (embed + layers * (4 * width**2 + mlp_entries) + merger),
            full=4 * width * full_layers,
            windowed=4 * width * (layers - full_layers) if geometry.window else 0,
            side=geometry.window * geometry.spatial_merge_size,
        )

    @classmethod
    def from_config(cls, config) -> "FrameCosts":
        """Of a tower with this transformers vision config (Qwen2-VL's or Qwen2.5-VL's)."""
        geometry = Geometry.from_config(config)
        width = geometry.num_heads * geometry.head_dim
        full, out = getattr(config, "fullatt_block_indexes", None), getattr(config, "out_hidden_size", None)
        if hasattr(config, "intermediate_size"):
            mlp = 3 * width * config.intermediate_size
        else:
            mlp = int(2 * width * width * config.mlp_ratio)
        return cls.from_geometry(
            geometry,
            layers=config.depth,
            full_layers=config.depth if full is None else len({i for i in full if i < config.depth}),
            mlp_entries=mlp,
            out_width=config.hidden_size if out is None else out,
        )


@cache
def published_costs(geometry: Geometry) -> FrameCosts:
    """`FrameCosts.from_geometry` with its defaults."""
    return FrameCosts.from_geometry(geometry)
