"""What the pictures of the tour show: the index tensors of one photo or clip, and a chosen patch among them."""

from dataclasses import dataclass

import numpy as np

from ..geometry import Geometry, check_grid_thw
from ..indices import cu_seqlens, rot_pos_ids, window_index
from . import workloads

PIXELS = 14  # side of a patch
MOST = {"t": 8, "h": 48, "w": 48, "window": 12, "merge": 4}  # beyond these a picture shows nothing any more


@dataclass(frozen=True)
class Scene:
    """The index tensors of one grid as numpy arrays, by vitkit's own functions, and the chosen patch among them.

    pos_ids: (N, 2) in image order; index, reverse: (N/m²) merged units; frames, windows: cu_seqlens in patches.
    """

    grid: tuple
    geometry: Geometry
    patch: int
    pos_ids: np.ndarray
    index: np.ndarray
    reverse: np.ndarray
    frames: np.ndarray
    windows: np.ndarray

    @property
    def unit(self) -> int:
        """The merge block of the chosen patch, counted in image order."""
        return self.patch // self.geometry.spatial_merge_size**2

    @property
    def frame(self) -> int:
        return self.patch // (self.grid[1] * self.grid[2])

    @property
    def place(self) -> int:
        """Where the chosen patch stands in window order."""
        block = self.geometry.spatial_merge_size**2
        return int(self.reverse[self.unit]) * block + self.patch % block

    @property
    def order(self) -> np.ndarray:
        """(N) patches in window order, each by its row in image order."""
        block = self.geometry.spatial_merge_size**2
        return (self.index[:, None] * block + np.arange(block)).ravel()

    def map(self, values, frame=None) -> np.ndarray:
        """(h, w): one value a patch in image order, laid out as the photo; of the chosen patch's frame."""
        _, h, w = self.grid
        out, start = np.empty((h, w), values.dtype), self.frame * h * w
        rows, columns = self.pos_ids[start : start + h * w].T
        out[rows, columns] = values[start : start + h * w]
        return out


def scene(t, h, w, window, merge, patch) -> Scene:
    """Checks the values and computes every index of the grid."""
    for name, value in {"t": t, "h": h, "w": w, "window": window, "merge": merge}.items():
        least = 0 if name == "window" else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST[name]:
            raise ValueError(f"{name}={value!r}: an integer from {least} to {MOST[name]} is allowed in the tour")
    geometry = Geometry(PIXELS, merge, window * merge * PIXELS or None)
    check_grid_thw([[t, h, w]], geometry)
    if isinstance(patch, bool) or not isinstance(patch, int) or not 0 <= patch < t * h * w:
        raise ValueError(
            f"patch={patch!r}: an integer from 0 to {t * h * w - 1} is allowed for {t} x {h} x {w} patches"
        )
    grid = [[t, h, w]]
    found = window_index(grid, geometry, impl="torch")
    ids, frames = rot_pos_ids(grid, geometry, impl="torch"), cu_seqlens(grid, geometry, impl="torch").cu_seqlens
    arrays = (x.numpy() for x in (ids, found.index, found.reverse, frames, found.cu_seqlens))
    return Scene((t, h, w), geometry, patch, *arrays)


def indices(t, h, w, window, merge, patch) -> dict:
    """What every index tensor says of the chosen patch, by name."""
    s = scene(t, h, w, window, merge, patch)
    row, column = (int(x) for x in s.pos_ids[patch])
    number = int(np.searchsorted(s.windows, s.place, side="right")) - 1
    start, end = (int(x) for x in s.windows[number : number + 2])
    return {
        "row in image order": patch,
        "frame": s.frame,
        "position ids h and w": f"{row} and {column}",
        "merge block": s.unit,
        "window": number,
        "place in window order": s.place,
        "window segment": f"{start} to {end - 1}",
        "frame segment": "{} to {}".format(*(s.frames[s.frame : s.frame + 2] - [0, 1])),
    }


def find_photo(name: str = "") -> workloads.Photo:
    """The photo of this name among `workloads.photos()`; "" takes the cat, or the first where there is none."""
    found = {photo.name: photo for photo in workloads.photos()}
    if not found or (name and name not in found):
        raise ValueError(f"photo={name!r}: one of {', '.join(found) or 'none'} is allowed here")
    return found[name] if name else found.get("chelsea", next(iter(found.values())))


def pixels(photo, s: Scene) -> np.ndarray:
    """(h*14, w*14, 3) uint8: the chosen patch's frame. Of a clip, a camera pans over the photo."""
    from PIL import ImageOps

    t, h, w = s.grid
    image = workloads.clip_frames(photo, t)[s.frame] if t > 1 else photo.image
    return np.asarray(ImageOps.fit(image, (w * PIXELS, h * PIXELS)))
