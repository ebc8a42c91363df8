"""Pictures of folders, tar files and Parquet: Pillow's pixels, and the same bytes at a step, also after a resume."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.data.images import source as picture_source
from jaxpar.data.images.digits import write_digits
from jaxpar.data.images.image_config import ImageConfig
from jaxpar.data.images.pixels import pixels, random_box
from jaxpar.data.validate import CorruptBatch
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import load

Image, ImageOps = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
CLASSES = ("bird", "cat", "dog")


def picture(number, mode="RGB", size=(24, 18)):
    width, height = size
    numbers = np.random.default_rng(number).integers(0, 256, (height, width, len(mode) if mode != "P" else 1), np.uint8)
    image = Image.fromarray(numbers[..., 0] if numbers.shape[-1] == 1 else numbers, None if mode != "P" else "L")
    return image.convert(mode)


def encoded(image, kind="PNG", **keys):
    stream = io.BytesIO()
    image.save(stream, kind, **keys)
    return stream.getvalue()


def write_folders(folder, count=12, begin=0):
    for number in range(begin, begin + count):
        path = folder / CLASSES[number % 3] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number)))
    return folder


def opened(path, folder=None, *, seed=3, held_out=0.0, augment=(), shuffle=True, **keys):
    images = ImageConfig(**{"size": (12, 16)} | keys)
    spec = jp.Data(source="images", path=str(path), images=images, held_out=held_out, augment=augment, shuffle=shuffle)
    return jp.open_data(spec, folder or path.parent / "data", seed=seed)


def of_pillow(image, mode="RGB", size=(16, 12)):
    """Pillow's own crop of the middle, resized."""
    fitted = ImageOps.fit(image.convert(mode), size, Image.Resampling.BILINEAR)
    return np.asarray(fitted, np.float32).reshape(size[1], size[0], -1) / np.float32(255)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_pillow(mode, channels):
    image = picture(1, "RGB", (40, 18)).convert(mode)
    content = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    got = pixels(content, ImageConfig(size=(12, 16), channels=channels), "it", None)
    np.testing.assert_array_equal(got, of_pillow(image, {1: "L", 3: "RGB"}[channels]))
    share = pixels(content, ImageConfig(size=9, channels=channels, crop_share=0.5), "it", None)
    cut = image.convert({1: "L", 3: "RGB"}[channels]).resize(
        (9, 9), Image.Resampling.BILINEAR, box=(15.5, 4.5, 24.5, 13.5)
    )
    np.testing.assert_array_equal(share, np.asarray(cut, np.float32).reshape(9, 9, -1) / np.float32(255))


def test_a_jpeg_stands_upright_and_is_normalized():
    image, exif = picture(2), Image.Exif()
    exif[0x0112] = 6  # turned by the camera
    content = encoded(image, "JPEG", quality=95, exif=exif)
    seen = Image.open(io.BytesIO(content)).convert("RGB").transpose(Image.Transpose.ROTATE_270)
    config = ImageConfig(size=(24, 18), resize="exact", mean=(0.5, 0.4, 0.3), std=(0.2,))
    expected = (np.asarray(seen, np.float32) / np.float32(255) - np.float32([0.5, 0.4, 0.3])) / np.float32(0.2)
    np.testing.assert_array_equal(pixels(content, config, "it", None), expected)


def test_random_boxes_have_the_areas_and_shapes_of_the_paper():
    boxes = [random_box(300, 200, np.random.default_rng(number)) for number in range(2000)]
    left, upper, right, lower = np.array(boxes).T
    assert (left >= 0).all()
    assert (upper >= 0).all()
    assert right.max() == 300
    assert lower.max() == 200
    areas, aspects = (right - left) * (lower - upper) / 60_000, (right - left) / (lower - upper)
    assert 0.079 < areas.min() < 0.1
    assert areas.max() > 0.85
    assert 0.74 < aspects.min() < 0.78
    assert 1.3 < aspects.max() < 1.35
    for size in ((1000, 3), (3, 1000), (1, 1)):  # into which no drawn box may fit
        box = random_box(*size, np.random.default_rng(0))
        assert 0 <= box.left < box.right <= size[0]
        assert 0 <= box.upper < box.lower <= size[1]
    assert random_box(3000, 3, np.random.default_rng(0)) == (1498, 0, 1502, 3)


def write_tars(folder, names, *, members=("png", "cls"), named=True):
    folder.mkdir()
    files = [folder / "shard-0.tar", folder / "shard-1.tar"]
    for number, file in enumerate(files):
        with tarfile.open(file, "w") as archive:
            for index, (content, label) in list(enumerate(names))[number::2]:
                text = str(CLASSES[label] if named else label)
                text = json.dumps({"label": text if named else label}) if members[1] == "json" else text
                for suffix, value in zip(members, (content, text.encode()), strict=True):
                    entry = tarfile.TarInfo(f"./some/{index:03d}.{suffix}")
                    entry.size = len(value)
                    archive.addfile(entry, io.BytesIO(value))
    return files


def write_parquet(file, names, *, struct=True, features=True):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file.parent.mkdir(exist_ok=True)
    cells = [{"bytes": content, "path": None} if struct else content for content, _ in names]
    table = pyarrow.table({"image": cells, "label": [label for _, label in names]})
    label = {"names": [*CLASSES], "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": label}}})}
    parquet.write_table(table.replace_schema_metadata(metadata) if features else table, file, row_group_size=5)


def rows_of(source):
    batch = source.batch(0, source.examples)
    return sorted(zip(batch["labels"].tolist(), (image.tobytes() for image in batch["inputs"]), strict=True))


def test_folders_tar_files_and_parquet_hold_the_same_pictures(tmp_path):
    names = [(encoded(picture(number)), number % 3) for number in range(12)]
    write_folders(tmp_path / "pictures")
    for kind, keys in {"cls": {}, "json": {"members": ("png", "json")}, "number": {"named": False}}.items():
        write_tars(tmp_path / kind, names, **keys)
    write_parquet(tmp_path / "parquet/a.parquet", names)
    write_parquet(tmp_path / "bytes/a.parquet", names, struct=False, features=False)
    source = opened(tmp_path / "pictures", shuffle=False)
    expected = rows_of(source)
    assert expected == sorted((n % 3, of_pillow(picture(n)).tobytes()) for n in range(12))
    assert json.loads((tmp_path / "data/classes.json").read_text()) == [*CLASSES]
    for path in ("cls", "json", "number", "parquet", "bytes"):
        other = opened(tmp_path / path)
        assert rows_of(other) == expected
        assert other.index.classes == (("0", "1", "2") if path in ("number", "bytes") else CLASSES)
    assert rows_of(opened(tmp_path / "cls/*.tar", tmp_path / "data")) == expected


def test_an_index_is_built_once_and_anew_for_other_files(tmp_path, monkeypatch):
    names = [(encoded(picture(number)), number % 3) for number in range(6)]
    write_tars(tmp_path / "tar", names)
    write_parquet(tmp_path / "parquet/a.parquet", names)
    prints = [opened(tmp_path / kind).fingerprint for kind in ("tar", "parquet")]
    calls = []
    for name in ("list_tars", "copy_pictures"):
        function = getattr(picture_source, name)
        monkeypatch.setattr(picture_source, name, lambda *args, function=function: calls.append(1) or function(*args))
    assert [opened(tmp_path / kind).fingerprint for kind in ("tar", "parquet")] == prints
    assert not calls
    next((tmp_path / "data").glob("*.bin")).unlink()
    assert rows_of(opened(tmp_path / "parquet")) == rows_of(opened(tmp_path / "tar"))
    assert len(calls) == 1
    next((tmp_path / "data").glob("*.npz")).write_bytes(b"PK damaged")
    (tmp_path / "tar/shard-1.tar").unlink()
    assert opened(tmp_path / "tar").fingerprint != prints[0]
    assert opened(tmp_path / "parquet").fingerprint == prints[1]


def test_a_batch_depends_on_seed_and_step_alone(tmp_path):
    write_folders(tmp_path / "pictures")
    keys = {"resize": "random_resized_crop", "augment": ("flip", "crop"), "held_out": 0.25}
    source = opened(tmp_path / "pictures", threads=1, **keys)
    run_through = [source.batch(step, 4) for step in range(6)]
    resumed = opened(tmp_path / "pictures", threads=8, **keys)
    for step in (4, 5, 2):
        np.testing.assert_array_equal(resumed.batch(step, 4)["inputs"], run_through[step]["inputs"])
        np.testing.assert_array_equal(resumed.batch(step, 4)["labels"], run_through[step]["labels"])
    rows = np.array([1, 3])
    read = []
    resumed.index = type("Counted", (), {"read": lambda _, n: read.append(n) or source.index.read(n),
                                         "names": source.index.names, "labels": source.index.labels})()  # fmt: skip
    np.testing.assert_array_equal(resumed.batch(5, 4, rows)["inputs"], run_through[5]["inputs"][rows])
    assert len(read) == 2  # a process reads its own rows alone
    other = opened(tmp_path / "pictures", seed=4, **keys)
    assert not np.array_equal(other.batch(0, 4)["inputs"], run_through[0]["inputs"])
    held, of_other = (each.evaluation(0, 3)[0].batch["inputs"] for each in (source, other))
    np.testing.assert_array_equal(held, of_other)  # neither drawn from the seed nor cropped at random
    assert source.examples == 9


def test_a_folder_val_is_what_is_evaluated(tmp_path):
    write_folders(tmp_path / "pictures/train", 6)
    write_folders(tmp_path / "pictures/validation", 2, begin=7)  # a cat and a dog, no bird
    write_folders(tmp_path / "pictures/test", 3, begin=20)
    source = opened(tmp_path / "pictures", held_out=0.25)
    assert source.examples == 6
    [batch] = source.evaluation(0, 2)
    assert batch.batch["labels"].tolist() == [1, 2]
    np.testing.assert_array_equal(batch.batch["inputs"], [of_pillow(picture(7)), of_pillow(picture(8))])
    assert source.evaluation(1, 2) == []
    names = [(encoded(picture(number)), number % 3) for number in range(6)]
    write_parquet(tmp_path / "parquet/train-00000-of-00001.parquet", names)
    write_parquet(tmp_path / "parquet/validation-00000-of-00001.parquet", names[1:3])
    write_parquet(tmp_path / "parquet/test-00000-of-00001.parquet", names[:3])
    source = opened(tmp_path / "parquet")
    assert source.examples == 6
    assert source.evaluation(0, 2)[0].batch["labels"].tolist() == [1, 2]


def test_a_share_is_held_out_by_the_names_and_few_change_when_pictures_are_added(tmp_path):
    write_folders(tmp_path / "pictures", 40)
    before = opened(tmp_path / "pictures", held_out=0.25)
    held = {before.index.names[number] for number in before.held_out_indices}
    assert len(held) == 10
    assert len({*before.index.labels[before.held_out_indices]}) == 3
    assert {*before.held_out_indices} | {*before.train_indices} == {*range(40)}
    write_folders(tmp_path / "pictures", 4, begin=40)
    after = opened(tmp_path / "pictures", held_out=0.25)
    assert len(held - {after.index.names[number] for number in after.held_out_indices}) <= 2


DAMAGED = {
    "truncated.png": (encoded(picture(0))[:-400], "trunc"),
    "truncated.jpg": (encoded(picture(0), "JPEG")[:-60], "truncated"),
    "flipped.png": (bytes(byte ^ (300 < place < 310) for place, byte in enumerate(encoded(picture(0)))), ""),
    "empty.png": (b"", "it is empty"),
    "text.jpg": (b"<html>not found</html>", "it is no picture"),
    "deep.png": (encoded(Image.fromarray(np.full((18, 24), 40_000, np.uint16))), "I;16 has more than 8 bits"),
    "gone.png": (None, "No such file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_picture_is_named(tmp_path, name):
    content, reason = DAMAGED[name]
    path = write_folders(tmp_path / "pictures", 3) / "cat" / name
    path.write_bytes(content or b"")
    source = opened(tmp_path / "pictures")
    if content is None:
        path.unlink()
    with pytest.raises(CorruptBatch, match=rf"(?s)cat/{name}: .*{reason}"):
        source.batch(0, 4)


def test_pictures_of_another_size_are_refused_if_it_should_be_exact(tmp_path):
    write_folders(tmp_path / "pictures", 3)
    with pytest.raises(CorruptBatch, match=r"\.png has 18 x 24 pixels, data.images.size = \[12, 16\]"):
        opened(tmp_path / "pictures", resize="exact").batch(0, 3)


def no_class(folder):
    write_folders(folder)
    (folder / "empty").mkdir()


def stray_picture(folder):
    write_folders(folder)
    (folder / "stray.jpg").write_bytes(encoded(picture(0), "JPEG"))


def train_alone(folder):
    write_folders(folder / "train")
    write_folders(folder / "test")


def new_in_val(folder):
    write_folders(folder / "train", 2)
    write_folders(folder / "val", 3)


def dangling(folder):
    (write_folders(folder) / "cat/999.png").symlink_to("nowhere.png")


def tar_of(*members):
    def write(folder):
        folder.mkdir()
        with tarfile.open(folder / "a.tar", "w") as archive:
            for name, value in members:
                entry = tarfile.TarInfo(name)
                entry.size = len(value)
                archive.addfile(entry, io.BytesIO(value))

    return write


def truncated_tar(folder):
    file = write_tars(folder, [(encoded(picture(number)), number % 3) for number in range(6)])[0]
    file.write_bytes(file.read_bytes()[:2000])


def compressed_tar(folder):
    folder.mkdir()
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))


def null_label(folder):
    write_parquet(folder / "a.parquet", [(encoded(picture(0)), 0), (encoded(picture(1)), None)], features=False)


def only_paths(folder):
    write_parquet(folder / "a.parquet", [(None, 0), (None, 1)])


PNG = encoded(picture(0))
WRONG = {
    "no folder": (lambda folder: None, "names no file"),
    "an empty folder": (lambda folder: folder.mkdir(), "has no folder of a class"),
    "folders without pictures": (lambda folder: (folder / "a").mkdir(parents=True), "has no picture in 1 folder"),
    "a class without pictures": (no_class, "class empty has no picture"),
    "a picture beside the folders": (stray_picture, r"stray\.jpg lies in no class's folder"),
    "a link to nowhere": (dangling, r"cat/999\.png: No such file"),
    "one class": (lambda folder: write_folders(folder, 1), "has one class: bird"),
    "train without val": (train_alone, "has the folders test, train"),
    "a class of val alone": (new_in_val, "label 'dog' of dog/002.png"),
    "a key without a label": (tar_of(("1.png", PNG), ("2.png", PNG)), "a.tar: 1 has no label, only png"),
    "a label without a picture": (tar_of(("1.cls", b"0")), "a.tar: 1 has 0 pictures, of members cls"),
    "no such key": (tar_of(("1.png", PNG), ("1.json", b'{"class": 1}')), r"a.tar: 1\.json has no label 'label'"),
    "labels of two kinds": (
        tar_of(("1.png", PNG), ("1.cls", b"0"), ("2.png", PNG), ("2.cls", b"cat")), "labels of int, str",
    ),
    "labels from 1": (tar_of(("1.png", PNG), ("1.cls", b"1"), ("2.png", PNG), ("2.cls", b"2")), "class 0 has no"),
    "a negative label": (tar_of(("1.png", PNG), ("1.cls", b"-1"), ("2.png", PNG), ("2.cls", b"1")), "label .*-1"),
    "a truncated tar": (truncated_tar, "shard-0.tar: unexpected end of data"),
    "a compressed tar": (compressed_tar, r"(?s)a.tar.gz: .*gunzip a.tar.gz"),
    "no such column": (lambda folder: write_parquet(folder / "a.parquet", []), "has no row"),
    "a label that is null": (null_label, "a.parquet, row 2: label is null"),
    "paths without bytes": (only_paths, r"row 1: image is \{bytes: None"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pictures_are_refused(tmp_path, name):
    write, message = WRONG[name]
    write(tmp_path / "pictures")
    with pytest.raises(JaxparError, match=message):
        opened(tmp_path / "pictures").batch(0, 2)


def test_columns_and_broken_parquet_are_refused(tmp_path):
    write_parquet(tmp_path / "pictures/a.parquet", [(PNG, 0), (PNG, 1)])
    with pytest.raises(JaxparError, match="has no column 'img', only image, label"):
        opened(tmp_path / "pictures", image="img")
    (tmp_path / "pictures/a.parquet").write_bytes(b"PAR1")
    with pytest.raises(JaxparError, match=r"a.parquet: .*Parquet"):
        opened(tmp_path / "pictures")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": 0}, "data.images.size = 0"),
        ({"size": (1, 2, 3)}, r"data.images.size = \(1, 2, 3\)"),
        ({"channels": 4}, "data.images.channels = 4"),
        ({"mean": (0.1, 0.2)}, r"data.images.mean = \[0.1, 0.2\]"),
        ({"std": (0.0,)}, r"std has a positive number"),
        ({"crop_share": 0.0}, "data.images.crop_share = 0.0"),
        ({"resize": "exact", "crop_share": 0.5}, "crop_share = 0.5 with exact"),
        ({"classes": ("a", "a")}, "data.images.classes"),
        ({"threads": -1}, "data.images.threads"),
    ],
)
def test_wrong_settings_are_refused(keys, message):
    with pytest.raises(JaxparError, match=message):
        ImageConfig(**keys)


def test_classes_that_are_named_may_lack_pictures_and_number_those_of_a_set(tmp_path):
    write_folders(tmp_path / "pictures", 2)
    names = ("dog", "cat", "bird")
    assert opened(tmp_path / "pictures", classes=names, shuffle=False).batch(0, 2)["labels"].tolist() == [2, 1]
    sets = {"other": {"path": str(tmp_path / "pictures")}}
    with pytest.raises(JaxparError, match=r"data.sets.other without data.images.classes"):
        jp.Data(source="images", path="pictures", sets=sets)
    jp.Data(source="images", path="pictures", sets=sets, images=ImageConfig(classes=names))


JOB = Path(__file__).parents[2] / "configs/files/images.toml"
SMALL = ("model.blocks=[1]", "model.width=8", "parallel.data=8", "parallel.fsdp=1", "data.images.size=8",
         "data.augment=['flip']", "train.global_batch=16", "train.eval_every=3", "checkpoint.every=2",
         "checkpoint.keep_best=0", "optimizer.decay='constant'")  # fmt: skip


@pytest.mark.slow
def test_a_run_on_pictures_is_resumed_bit_for_bit(tmp_path, capsys):
    write_digits(tmp_path / "pictures", 100)
    words, rows = [*SMALL, f"data.path='{tmp_path}/pictures'"], []
    for name, steps in (("whole", [6]), ("parts", [3, 6])):
        for count in steps:
            job = load(JOB, [*words, f"run.dir='{tmp_path}/{name}'", f"train.steps={count}"])
            run.train(job, stream=io.StringIO())
        metrics = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        rows.append([(row["loss"], row.get("eval_loss")) for row in metrics])
    assert rows[0] == rows[1]
    assert rows[0][-1][1] > 0
    words = [*words, f"run.dir='{tmp_path}/new'"]
    assert main(["check", str(JOB), *words]) == 0
    assert "100 pictures in 10 classes: 0, 1, 2" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()  # a check writes nothing
    problems = "".join(map(str, check(load(JOB, [*words, "model.channels=3", "model.classes=9"]))))
    assert "model.channels = 3, data.images.channels = 1" in problems
    assert "model.classes = 9, the pictures have 10 classes" in problems
