"""One colour and one marker for each implementation in every figure, and the axes that all figures start from."""

from .figure import WIDTH, Figure

# Okabe and Ito's colours, then Tol's muted ones, which remain apart for colour-blind readers.
STYLES = {
    "reference": ("#000000", "o"),
    "transformers": ("#D55E00", "s"),
    "eager": ("#E69F00", "^"),
    "torch": ("#56B4E9", "D"),
    "torch_compile": ("#CC79A7", "v"),
    "numba": ("#009E73", "P"),
    "triton": ("#0072B2", "*"),
    "triton_separate": ("#332288", "X"),
    "flash_attn_2x": ("#882255", "<"),
    "flash_attn_cat": ("#CC6677", ">"),
    "liger": ("#999933", "h"),
    "size_cache": ("#661100", "d"),
    "size_cache_numpy": ("#A0522D", (5, 0, 0)),
    "size_cache_cold": ("#DFC27D", (3, 1, 180)),
    "transformers_cpu_grid": ("#FFAABB", (4, 0, 20)),
    "auto": ("#AA3377", (7, 1, 0)),
    # Relatives of numba in greens, of triton in blues and violets.
    "numba_in_place": ("#66C2A5", (4, 0, 0)),
    "numba_from_pos": ("#1B7837", (5, 0, 180)),
    "triton_in_place": ("#4A90D9", (4, 1, 0)),
    "triton_from_pos": ("#08306B", (6, 1, 0)),
    "triton_from_pos_in_place": ("#8FB8DE", (3, 1, 0)),
    "triton_low": ("#5C1A8B", (4, 1, 45)),
    "triton_low_in_place": ("#9970AB", (8, 1, 0)),
    # Forwards of a tower: transformers' in oranges, ours in blues that darken with every part that is added.
    "transformers_varlen": ("#FDB863", (4, 0, 70)),
    "plan": ("#C6DBEF", (5, 1, 180)),
    "plan+rotary": ("#9ECAE1", (3, 0, 90)),
    "+embed": ("#7DBBDF", (5, 0, 36)),
    "+mlp": ("#57A0CE", (3, 0, 270)),
    "+norms": ("#3182BD", (7, 0, 0)),
    "+windows": ("#1D69B1", (4, 1, 20)),
    "accelerate": ("#08519C", (9, 1, 0)),
}
OTHERS = [("#6E6E6E", "p"), ("#9A9A9A", "H"), ("#4A4A4A", "8")]
LIMITS = {"copy": "--", "empty_launch": ":", "in_place_negate": "-."}
X_LABELS = {"n_tokens": "tokens", "n_images": "images in the batch", "bytes": "bytes"}
SIZES = {"*": 10, "P": 8, "X": 7.5}  # of markers, in points; 6 for the others, 9 for stars
GREY, GRID = "#555555", "#E4E4E4"


def new_figure(height):
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    ax = fig.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    return fig, ax


def style(impl, others):
    return STYLES.get(impl) or OTHERS[others.index(impl) % len(OTHERS)]


def ordered(names) -> list[str]:
    """Each once: those with a style in the order of STYLES, then the others by name."""
    return [*[name for name in STYLES if name in set(names)], *sorted(set(names) - set(STYLES))]


def marker_size(marker) -> float:
    star = isinstance(marker, tuple) and marker[1] == 1
    return SIZES.get(marker, 9 if star else 6)
