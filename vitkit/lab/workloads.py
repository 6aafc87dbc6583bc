"""Real grids: the published workloads, photos put through transformers' own image processor, and the user's own list.

A grid is a list of rows [t, h, w] in patches, one a photo or clip. transformers, matplotlib and Pillow are imported
when a function needs them, so that importing this file costs nothing.
"""

import csv
import json
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..geometry import Geometry, check_grid_thw

# Limits that Qwen publishes for one video frame, in pixels; a photo's are the processor's defaults.
VIDEO_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}

MAX_PIXELS = 64_000_000  # of a photo; the processor scales all above 1 million down anyway
MAX_BATCHES = 200  # of the user's own grids: each is timed for a second or two

# Photos in scikit-image's wheel that its documentation states to be in the public domain or CC0.
SKIMAGE_PHOTOS = {
    "astronaut": ("astronaut.png", "NASA Great Images, public domain"),
    "coffee": ("coffee.png", "Rachel Michetti, CC0"),
    "chelsea": ("chelsea.png", "Stefan van der Walt, CC0"),
    "rocket": ("rocket.jpg", "SpaceX, public domain"),
    "hubble_deep_field": ("hubble_deep_field.jpg", "NASA, public domain"),
    "retina": ("retina.jpg", "Mikael Häggström, CC0"),
}


@dataclass(frozen=True)
class Photo:
    """image: PIL, RGB, in its own size; source: where it comes from and its licence."""

    name: str
    image: object
    source: str


def _root() -> Path:
    from .results import repo_root

    return Path(repo_root())


def load_workloads(root: Path | None = None) -> list[tuple[str, list]]:
    """The five published workloads, (name, grid_thw) each, from data/workloads.json below `root`."""
    text = (Path(root or _root()) / "data" / "workloads.json").read_text(encoding="utf-8")
    return [(row["name"], row["grid_thw"]) for row in json.loads(text)]


def _open(path):
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels: up to {MAX_PIXELS} are allowed")
        return ImageOps.exif_transpose(image).convert("RGB")


def photos(folder: Path | str | None = None) -> list[Photo]:
    """The photos that installed packages carry, then those in `folder` (default: data/images of the repository).

    Nothing is downloaded: a package that is not installed contributes nothing. Order and names are fixed; a file in
    `folder` that is no readable image is skipped with a warning that names it.
    """
    found = []
    if not find_spec("transformers"):
        warnings.warn("no photos: transformers, whose image processor cuts them into patches, is missing", stacklevel=2)
        return found
    if find_spec("matplotlib"):
        from matplotlib.cbook import get_sample_data

        path = get_sample_data("grace_hopper.jpg", asfileobj=False)
        found.append(Photo("grace_hopper", _open(path), "matplotlib: US Navy (James S. Davis), public domain"))
    spec = find_spec("skimage")
    for name, (file, source) in SKIMAGE_PHOTOS.items() if spec else ():
        path = Path(spec.submodule_search_locations[0]) / "data" / file  # skimage.data's functions may download
        if path.exists():
            found.append(Photo(name, _open(path), f"scikit-image: {source}"))
    folder = Path(folder) if folder is not None else _root() / "data" / "images"
    own = 0
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.suffix.lower() == ".md" or not path.is_file():
            continue
        try:
            photo = Photo(f"own photo {own + 1}", _open(path), "the user's own")  # its file name is nobody's business
            photo_grid(photo)
        except Exception as error:  # Pillow raises many kinds for a broken file, the processor one for a thin strip
            warnings.warn(f"{path} is skipped: no usable image ({error})", stacklevel=2)
        else:
            own += 1
            found.append(photo)
    return found


@cache
def _processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2)


def _scaled(image, scale: float):
    if scale == 1:
        return image
    return image.resize((max(28, round(image.width * scale)), max(28, round(image.height * scale))))


def process(photo: Photo, scale: float = 1):
    """(pixel_values, [1, h, w]) as transformers' processor gives them; pixel_values is float32 (h*w, 3*2*14*14).

    `scale` resizes the photo first, as if it had been taken with fewer or more pixels.
    """
    out = _processor()(images=[_scaled(photo.image, scale)], return_tensors="np")
    return out["pixel_values"], [int(x) for x in out["image_grid_thw"][0]]


def photo_grid(photo: Photo, scale: float = 1) -> list[int]:
    """[1, h, w] of a photo in patches of 14 pixels, h and w even: the processor's own `image_grid_thw`."""
    return process(photo, scale)[1]


def seen_image(photo: Photo, scale: float = 1):
    """(image, [1, h, w]): the photo as the tower sees it, (h*14, w*14) pixels, put together again from pixel_values."""
    from PIL import Image

    pixels, (t, h, w) = process(photo, scale)
    # rows are in merge-block order: (h/2, w/2, 2, 2), each (3 colours, 2 equal frames, 14, 14)
    blocks = pixels.reshape(h // 2, w // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
    image = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * 14, w * 14, 3)
    image = image * np.array(_processor().image_std) + np.array(_processor().image_mean)
    return Image.fromarray((image * 255).round().clip(0, 255).astype(np.uint8)), [t, h, w]


def photo_grids(photos_: list[Photo] | None = None, *, scales=(0.5, 1, 2), repeats=(1, 8)) -> list[tuple[str, list]]:
    """(name, grid_thw) for every photo at every scale, then all photos of scale 1 in one batch, `repeats` times each.

    A scale that leaves a photo's grid as it was (the processor caps a photo at 1280 merged units) adds no entry.
    """
    photos_ = photos() if photos_ is None else photos_
    singles, batch = [], []
    for photo in photos_:
        seen = []
        for scale in scales:
            row = photo_grid(photo, scale)
            if row not in seen:
                seen.append(row)
                singles.append((photo.name if scale == 1 else f"{photo.name}, scale {scale:g}", [row]))
            if scale == 1:
                batch.append(row)
        if 1 not in scales:
            batch.append(photo_grid(photo))
    batches = [(f"{len(batch)} photos" + (f", {n} times" if n > 1 else ""), batch * n) for n in repeats if batch]
    return singles + batches


def clip_frames(photo: Photo, frames: int = 8) -> list:
    """`frames` PIL images of one size: a camera panning from left to right over the photo."""
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
        raise ValueError(f"frames={frames!r}: an integer of at least 1 is allowed")
    image, width = photo.image, max(1, photo.image.width * 3 // 4)
    lefts = [round(i * (image.width - width) / max(1, frames - 1)) for i in range(frames)]
    return [image.crop((left, 0, left + width, image.height)) for left in lefts]


def clip_grid(photo: Photo, frames: int = 8) -> list[int]:
    """[t, h, w] of a clip made from the photo: the processor's resize within a video's limits, t = ceil(frames / 2).

    Two frames make one patch in time; transformers' video processor repeats the last of an odd number.
    """
    images = clip_frames(photo, frames)
    processor = _processor()
    grid = processor(images=images[:1], size=VIDEO_SIZE, return_tensors="np")["image_grid_thw"]
    return [-(-frames // processor.temporal_patch_size), int(grid[0][1]), int(grid[0][2])]


def read_grids(value, geometry: Geometry | None = None) -> list[tuple[str, list]]:
    """The user's own batches, (name, grid_thw) each; [] for None or "".

    value: a list of [t, h, w] (one batch, "given"), the same as JSON text, or a path to
      .csv    columns t,h,w, with or without a header; with a header a column `batch` gathers rows into batches
      .jsonl  a line is [t,h,w], {"t":..,"h":..,"w":..} or {"grid_thw": [[t,h,w], ...]}, and each line a batch
    Every row is checked before anything is returned; ValueError names the file, the line and what is allowed.
    """
    geometry = geometry or Geometry()
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"grids={value!r}: a JSON list of [t, h, w] is allowed ({error})") from None
    if not isinstance(value, (str, Path)):
        rows = [list(row) for row in check_grid_thw(value, geometry)]
        return [("given", rows)] if rows else []
    path = Path(value)
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
    if path.suffix.lower() not in readers:
        raise ValueError(f"grids={str(value)!r}: a list of [t, h, w] or a path to a .csv or .jsonl file is allowed")
    if not path.is_file():
        raise ValueError(f"grids={str(value)!r}: no such file")
    batches = {}
    for line, batch, rows in readers[path.suffix.lower()](path):
        batch = f"own batch {batch}" if batch else f"own line {line}"
        if not rows:
            raise ValueError(f"{path}, line {line}: no row; at least one t, h, w is allowed")
        try:
            checked = [list(row) for row in check_grid_thw(rows, geometry)]
            batches[batch] = batches.get(batch, []) + checked
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
    if len(batches) > MAX_BATCHES:
        raise ValueError(
            f"{path}: {len(batches)} batches; up to {MAX_BATCHES} are allowed (a column `batch` joins rows)"
        )
    for batch, rows in batches.items():  # the limit on the patches of a whole batch
        try:
            check_grid_thw(rows, geometry)
        except ValueError as error:
            raise ValueError(f"{path}, batch {batch}: {error}") from None
    if not batches:
        raise ValueError(f"{path}: no row; at least one t, h, w is allowed")
    return list(batches.items())


def _csv_rows(path):
    """(line, batch name or "", [[t, h, w]]) of every row that is not blank."""
    columns = None
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if columns is None:
                names = [cell.lower() for cell in cells]
                if set("thw") <= set(names):
                    columns = names
                    continue
                columns = ["t", "h", "w"]
            where = f"{path}, line {reader.line_num}: {','.join(cells)!r}"
            if len(cells) != len(columns):
                raise ValueError(f"{where}: {len(columns)} columns {','.join(columns)} are allowed")
            try:
                row = [int(cells[columns.index(name)]) for name in "thw"]
            except ValueError:
                raise ValueError(f"{where}: integers t,h,w are allowed (or first a header that names them)") from None
            yield reader.line_num, cells[columns.index("batch")] if "batch" in columns else "", [row]


def _jsonl_rows(path):
    """(line, "", rows) of every line that is not blank."""
    allowed = '[t, h, w], {"t":, "h":, "w":} or {"grid_thw": [[t, h, w], ...]} is allowed'
    for line, text in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            item = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {line}: {error}; {allowed}") from None
        if isinstance(item, dict) and "grid_thw" in item:
            rows = item["grid_thw"]
        elif isinstance(item, dict) and set("thw") <= set(item):
            rows = [[item[name] for name in "thw"]]
        elif isinstance(item, list) and item:
            rows = item if isinstance(item[0], list) else [item]
        else:
            raise ValueError(f"{path}, line {line}: {text.strip()!r}: {allowed}")
        yield line, "", rows
