import json
import subprocess
import sys
import warnings

import numpy as np
import pytest

from vitkit.geometry import Geometry, check_grid_thw
from vitkit.lab import workloads


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """The photos that packages carry, without those of the user's folder."""
    return workloads.photos(tmp_path_factory.mktemp("no_images"))


def test_importing_is_cheap():
    heavy = "transformers", "matplotlib", "PIL"
    code = f"import sys, vitkit.lab.workloads; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_published_workloads():
    loaded = workloads.load_workloads()
    assert [name for name, _ in loaded][:3] == ["1x8x8", "1x36x36", "10x36x36"] and len(loaded) == 5
    tokens = [sum(t * h * w for t, h, w in check_grid_thw(grid, Geometry())) // 4 for _, grid in loaded]
    assert tokens == [16, 324, 3240, 32400, 32360]
    sizes = loaded[-1][1]
    assert len({tuple(row) for row in sizes}) == len(sizes) == 10


def test_photos_state_their_source(carried):
    assert len(carried) >= 5
    for photo in carried:
        assert photo.image.mode == "RGB"
        assert "public domain" in photo.source or "CC0" in photo.source


def test_photo_grids_are_the_same_twice_and_even(carried):
    first = workloads.photo_grids(carried[:3], scales=(0.5, 1), repeats=(1, 2))
    assert first == workloads.photo_grids(carried[:3], scales=(0.5, 1), repeats=(1, 2))
    names = [name for name, _ in first]
    assert len(set(names)) == len(names) == 8
    for _, grid in first:
        assert all(t == 1 and h % 2 == 0 and w % 2 == 0 for t, h, w in check_grid_thw(grid, Geometry()))
    assert len(first[-2][1]) == 3 and first[-1][1] == first[-2][1] * 2


def test_a_photo_at_the_cap_is_listed_once(carried):
    retina = [photo for photo in carried if photo.name == "retina"]
    if not retina:
        pytest.skip("scikit-image is not installed")
    assert [name for name, _ in workloads.photo_grids(retina, scales=(1, 2), repeats=())] == ["retina"]


def test_the_seen_image_is_the_photo_resized(carried):
    photo = carried[0]
    image, (t, h, w) = workloads.seen_image(photo)
    assert [t, h, w] == workloads.photo_grid(photo)
    assert image.size == (w * 14, h * 14)
    plain = np.asarray(photo.image.resize(image.size, 3), int)  # 3: bicubic, as the processor does
    assert np.abs(plain - np.asarray(image, int)).mean() < 1


def test_users_photos_and_a_broken_file(tmp_path, carried):
    carried[0].image.resize((90, 60)).save(tmp_path / "mine.png")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "README.md").write_text("not a photo")
    (tmp_path / ".hidden").write_text("not a photo")
    with pytest.warns(UserWarning, match="broken.jpg") as caught:
        found = workloads.photos(tmp_path)
    assert len(caught) == 1
    assert [photo.name for photo in found] == [*[photo.name for photo in carried], "own photo 1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workloads.photos(tmp_path / "absent")


@pytest.mark.parametrize("frames, t", [(1, 1), (2, 1), (7, 4), (8, 4)])
def test_clip(carried, frames, t):
    images = workloads.clip_frames(carried[0], frames)
    assert len(images) == frames and len({image.size for image in images}) == 1
    grid = workloads.clip_grid(carried[0], frames)
    assert grid[0] == t and grid[1] % 2 == 0 and grid[2] % 2 == 0


def test_clip_is_what_the_video_processor_gives(carried):
    try:
        import torchvision  # noqa: F401
        from transformers import Qwen2VLVideoProcessor
    except Exception as error:  # beside some builds of torch, torchvision raises a RuntimeError
        pytest.skip(f"torchvision does not import: {error}")
    for photo, frames in ((carried[0], 8), (carried[-1], 5)):
        video = np.stack([np.asarray(image) for image in workloads.clip_frames(photo, frames)])
        out = Qwen2VLVideoProcessor()(videos=[video], return_tensors="pt")
        assert out["video_grid_thw"][0].tolist() == workloads.clip_grid(photo, frames)


@pytest.mark.parametrize("frames", [0, True, 2.0])
def test_clip_refuses(carried, frames):
    with pytest.raises(ValueError, match="frames="):
        workloads.clip_frames(carried[0], frames)


@pytest.mark.parametrize("nothing", [None, "", []])
def test_no_grids(nothing):
    assert workloads.read_grids(nothing) == []


def test_grids_from_a_list():
    rows = [[1, 8, 8], [2, 4, 6]]
    assert workloads.read_grids(rows) == workloads.read_grids(json.dumps(rows)) == [("given", rows)]
    with pytest.raises(ValueError, match=r"grid_thw\[1\]"):
        workloads.read_grids([[1, 8, 8], [1, 3, 8]])
    with pytest.raises(ValueError, match="JSON"):
        workloads.read_grids("[[1, 8")


def _file(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1,8,8\n2,4,6\n", [("own line 1", [[1, 8, 8]]), ("own line 2", [[2, 4, 6]])]),
        ("t,h,w\n1,8,8\n\n2, 4, 6\n", [("own line 2", [[1, 8, 8]]), ("own line 4", [[2, 4, 6]])]),
        ("\ufeffw,H,t\n8,4,1\n", [("own line 2", [[1, 4, 8]])]),
        (
            "batch,t,h,w\nx,1,8,8\ny,1,2,2\nx,2,4,6\n",
            [("own batch x", [[1, 8, 8], [2, 4, 6]]), ("own batch y", [[1, 2, 2]])],
        ),
    ],
)
def test_grids_from_csv(tmp_path, text, expected):
    path = _file(tmp_path, "a.csv", text)
    assert workloads.read_grids(path) == workloads.read_grids(str(path)) == expected


def test_grids_from_jsonl(tmp_path):
    text = '[1, 8, 8]\n{"t": 2, "h": 4, "w": 6, "at": 0.5}\n\n{"grid_thw": [[1, 2, 2], [1, 4, 4]]}\n'
    assert workloads.read_grids(_file(tmp_path, "a.jsonl", text)) == [
        ("own line 1", [[1, 8, 8]]),
        ("own line 2", [[2, 4, 6]]),
        ("own line 4", [[1, 2, 2], [1, 4, 4]]),
    ]


@pytest.mark.parametrize(
    "name, text, line, allowed",
    [
        ("a.csv", "t,h,w\n1,8,8\n1,3,8\n", 3, "multiples"),
        ("a.csv", "1,8,8\n1,8\n", 2, "columns"),
        ("a.csv", "1,8.0,8\n", 1, "integers"),
        ("a.csv", "height,width\n8,8\n", 1, "columns"),
        ("a.jsonl", "[1, 8, 8]\n[1, 8\n", 2, "allowed"),
        ("a.jsonl", '{"t": 1, "h": 8}\n', 1, "allowed"),
        ("a.jsonl", "[1, 8, 8]\n[1, 8.0, 8]\n", 2, "integer"),
        ("a.jsonl", '{"t": 1, "h": true, "w": 8}\n', 1, "integer"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, text, line, allowed):
    path = _file(tmp_path, name, text)
    with pytest.raises(ValueError, match=allowed) as caught:
        workloads.read_grids(path)
    assert f"{name}, line {line}" in str(caught.value)


def test_files_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        workloads.read_grids(tmp_path / "absent.csv")
    with pytest.raises(ValueError, match=r"\.csv or \.jsonl"):
        workloads.read_grids(_file(tmp_path, "a.txt", "1,8,8"))
    with pytest.raises(ValueError, match="no row"):
        workloads.read_grids(_file(tmp_path, "a.csv", "t,h,w\n"))
    big = "batch,t,h,w\n" + "x,1000,1000,1000\n" * 3
    with pytest.raises(ValueError, match="batch x.*2\\^31"):
        workloads.read_grids(_file(tmp_path, "b.csv", big))
