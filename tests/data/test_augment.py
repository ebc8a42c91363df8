"""Random changes of images: a function of the seed and the step alone, the same for images and the labels of pixels."""

import numpy as np
import pytest

import jaxpar as jp
from jaxpar.data.images.pixels import augment


def images(rows=64, channels=3):
    pixels = np.arange(rows * 16 * 24, dtype=np.int32).reshape(rows, 16, 24)
    return {"inputs": np.stack([pixels] * channels, axis=-1).astype(np.float32), "labels": pixels}


def open_data(tmp_path, **keys):
    path = tmp_path / "images.npz"
    np.savez(path, **images())
    return jp.open_data(jp.Data(source="arrays", path=str(path), held_out=0.25, **keys))


def test_an_image_and_the_labels_of_its_pixels_change_alike():
    batch = augment(images(), np.arange(64), ("flip", "crop"), seed=3)
    np.testing.assert_array_equal(batch["inputs"][..., 0], batch["labels"])
    assert not np.array_equal(batch["labels"], images()["labels"])


def test_half_of_the_images_are_mirrored_and_all_keep_their_pixels():
    batch, before = augment(images(), np.arange(64), ("flip",), seed=0)["labels"], images()["labels"]
    mirrored = np.array([np.array_equal(a, b[:, ::-1]) for a, b in zip(batch, before, strict=True)])
    kept = np.array([np.array_equal(a, b) for a, b in zip(batch, before, strict=True)])
    assert (mirrored ^ kept).all()
    assert 16 <= mirrored.sum() <= 48


def test_a_shift_is_at_most_an_eighth_and_what_is_uncovered_is_mirrored():
    batch, before = augment(images(), np.arange(64), ("crop",), seed=0)["labels"], images()["labels"]
    shifts = set()
    for image, whole in zip(batch, before, strict=True):
        down, right = np.argwhere(whole == image[8, 12])[0] - (8, 12)
        assert abs(down) <= 2
        assert abs(right) <= 3
        padded = np.pad(whole, 3, mode="symmetric")
        np.testing.assert_array_equal(image, padded[3 + down : 19 + down, 3 + right : 27 + right])
        shifts.add((down, right))
    assert len(shifts) > 10


def test_a_batch_depends_on_the_step_alone_and_processes_see_their_rows_of_it(tmp_path):
    data, again = (open_data(tmp_path, augment=("flip", "crop")) for _ in range(2))
    whole = data.batch(5, 8)
    data.batch(0, 8)
    np.testing.assert_array_equal(again.batch(5, 8)["inputs"], whole["inputs"])
    rows = np.array([1, 4, 5])
    np.testing.assert_array_equal(again.batch(5, 8, rows)["labels"], whole["labels"][rows])
    plain = open_data(tmp_path)
    assert not np.array_equal(plain.batch(5, 8)["inputs"], whole["inputs"])


def test_what_is_held_out_does_not_change(tmp_path):
    augmented, plain = open_data(tmp_path, augment=("flip", "crop")), open_data(tmp_path)
    for changed, other in zip(augmented.evaluation(0, 8), plain.evaluation(0, 8), strict=True):
        np.testing.assert_array_equal(changed.batch["inputs"], other.batch["inputs"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "digits", "augment": ("turn",)}, r"data.augment = \['turn'\]"),
        ({"source": "stdlib", "augment": ("flip",)}, "data.augment with data.source = 'stdlib'"),
    ],
)
def test_wrong_augmentations_are_refused(keys, message):
    with pytest.raises(jp.JaxparError, match=message):
        jp.Data(**keys)


def test_arrays_without_rows_and_columns_are_refused():
    with pytest.raises(jp.JaxparError, match=r"augment = \['flip'\] of inputs \[4, 8\]"):
        augment({"inputs": np.zeros((4, 8))}, np.arange(4), ("flip",), seed=0)
