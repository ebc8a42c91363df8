"""Pictures in a folder for each class, as torchvision's `ImageFolder` has them."""

import os
from pathlib import Path

import numpy as np

from jaxpar.data.images.index import SUFFIXES, Entries
from jaxpar.errors import refuse

RULE = "pictures lie in a folder for each class: pictures/cat/1.jpg, pictures/dog/2.jpg"


def class_folders(folder: Path) -> list[Path]:
    """Returns the folders of the classes, sorted by name, without hidden ones."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def list_folders(folder: Path) -> tuple[Entries, tuple[str, ...], tuple[str, ...]]:
    """Lists the pictures of a folder with a folder for each class, sorted by class and path.

    Returns:
      The pictures, the names of all class folders, also of those without a picture, and messages to the user.

    Raises:
      JaxparError: If there is no folder of a class, or a picture lies beside the folders.
    """
    if stray := next((path for path in sorted(folder.iterdir()) if _is_picture(path.name) and path.is_file()), None):
        raise refuse(
            f"data.path = '{folder}': {stray.name} lies in no class's folder",
            rule=RULE,
            fix=f"{folder}/CLASS/{stray.name}",
        )
    classes = class_folders(folder)
    if not classes:
        raise refuse(
            f"data.path = '{folder}' has no folder of a class, no .tar and no .parquet",
            rule=RULE,
            fix=RULE.partition(": ")[2],
        )
    try:
        listed = [_pictures(path) for path in classes]
    except OSError as error:
        raise refuse(
            f"{error.filename}: {error.strerror}",
            rule="pictures can be read, and links among them lead to files",
            fix="its permissions, or without it",
        ) from error
    files = [file for pictures, _ in listed for file, _ in pictures]
    if not files:
        raise refuse(
            f"data.path = '{folder}' has no picture in {len(classes)} folders",
            rule=f"a picture's name ends in {', '.join(SUFFIXES)}",
            fix="the folder above or below it",
        )
    labels = [path.name for path, (pictures, _) in zip(classes, listed, strict=True) for _ in pictures]
    sizes = np.array([size for pictures, _ in listed for _, size in pictures], np.int64)
    places = np.stack([np.arange(len(files)), np.zeros_like(sizes), sizes], axis=1)
    names = [file[len(os.path.join(folder, "")) :] for file in files]
    entries = Entries(files, names, places, labels)
    return entries, tuple(path.name for path in classes), _notes([file for _, others in listed for file in others])


def _notes(others: list[str]) -> tuple[str, ...]:
    if not others:
        return ()
    subject = f"{len(others)} files of data.path are" if len(others) > 1 else "1 file of data.path is"
    return (f"{subject} no picture by name and not read (the first: {min(others)})",)


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _pictures(folder: Path | str) -> tuple[list[tuple[str, int]], list[str]]:
    """Returns the pictures in and below a folder with their sizes, sorted, and the other files.

    Hidden ones are in neither. Paths are texts, since there may be millions.
    """
    pictures, others = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inner, rest = _pictures(entry.path)
                pictures += inner
                others += rest
            elif _is_picture(entry.name):
                pictures.append((entry.path, entry.stat().st_size))
            else:
                others.append(entry.path)
    return sorted(pictures), others
