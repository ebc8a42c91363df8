"""Reads config, tokenizer and generation settings of a Hugging Face folder.

These small files are copied into a run that starts from the folder, and into its exports.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.files import check_plain

CONFIG, GENERATION = "config.json", "generation_config.json"
# files in which Hugging Face saves a tokenizer; SentencePiece's is a .model
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken")
SMALL_FILES = (
    *TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
    GENERATION,
)  # fmt: skip
# config keys of the tokens that begin, end and pad a text
EOS = "eos_token_id"
SPECIAL = ("bos_token_id", EOS, "pad_token_id")
HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # the name of a blob: SHA-1 of Git, or SHA-256 of large files
MOST = 2**28  # maximum bytes of a copied file


# a model id on the Hugging Face Hub, or the address of one
HUB = re.compile(r"(?:hf:/+|https://huggingface\.co/)?([\w-][\w.-]*/[\w.-]+)/?")


def is_local_name(name: str) -> bool:
    """Whether OWNER/NAME is a path of this machine rather than a name on the Hub: of a file, or in a folder there is.

    >>> is_local_name("data/train.csv"), is_local_name("meta-llama/Llama-3.1-8B")
    (True, False)
    """
    return bool(re.search(r"\.[A-Za-z]{2,}\d?$", name)) or os.path.exists(Path(name).parent)


def hub_download(name: str) -> tuple[str, str] | None:
    """Returns the command that downloads a model of the Hugging Face Hub, and its folder; None for any other name."""
    match = HUB.fullmatch(name)
    if not match or (match[1] == name.rstrip("/") and is_local_name(name)):
        return None
    folder = match[1].rpartition("/")[2]
    return f"hf download {match[1]} --local-dir {folder}", folder


def newest_snapshot(folder: Path) -> Path | None:
    """Returns the newest snapshot of a model in Hugging Face's cache, by the folder of the model; else None."""
    snapshots = [file.parent for file in folder.glob(f"snapshots/*/{CONFIG}")]
    return max(snapshots, key=lambda snapshot: snapshot.stat().st_mtime, default=None)


def is_folder(path: str | Path) -> bool:
    """Whether a path is a Hugging Face folder."""
    try:
        return bool(path) and (Path(path).expanduser() / CONFIG).is_file()
    except (OSError, RuntimeError, ValueError):  # too long, of an unknown user, or with a null byte
        return False


def read_config(file: Path) -> dict[str, Any]:
    """Reads a config.json.

    Raises:
      JaxparError: If it cannot be read, or is no table.
    """
    rule, fix = "a model's folder has a config.json", "save_pretrained(folder) of transformers writes one"
    check_plain(file, rule=rule, fix=fix)
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise refuse(f"{file}: {error.strerror}", rule=rule, fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"{file}: {str(error)[:200]}", rule=rule, fix=fix) from error
    if not isinstance(config, dict):
        raise refuse(f"{file} holds no table", rule=rule, fix=fix)
    return config


def special_ids(folder: Path) -> dict[str, Any]:
    """Returns the special token ids in a folder's config."""
    config = read_config(folder / CONFIG) if is_folder(folder) else {}
    return {key: config[key] for key in SPECIAL if config.get(key) is not None}


def end_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text, from generation_config.json, as in transformers, else from config.json.

    Chat models end a turn and a text with different tokens, and list both only in generation_config.json.
    """
    file = folder / GENERATION
    generation_ids = read_config(file).get(EOS) if file.is_file() else None
    ids = special_ids(folder).get(EOS) if generation_ids is None else generation_ids
    return tuple(token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))


def _small_files(source: Path, names: tuple[str, ...]) -> list[Path]:
    return sorted({path for name in names for path in source.expanduser().glob(name) if path.is_file()})


def check_links(source: Path, *, names: tuple[str, ...] = (CONFIG, *SMALL_FILES)) -> None:
    """Checks that the small files of a folder that are links may be copied into runs and exports.

    Hugging Face's cache, and folders that older versions downloaded with `--local-dir`, have links to its blobs, which
    are named by their hash. Any other link leads to a file of the same name: a folder from elsewhere could link a
    vocab.json to a private file, which an export would publish.

    Raises:
      JaxparError: With every link to a file of another name.
    """
    links = [(path, path.resolve()) for path in _small_files(source, names) if path.is_symlink()]
    problems = [
        Problem(
            f"{path} is a link to {target}",
            "the small files of a model go along with it: a link leads to a file of the same name, or into the blobs "
            "of Hugging Face's cache",
            f"cp --remove-destination {target} {path}, if it is meant",
        )
        for path, target in links
        if target.name != path.name and not (target.parent.name == "blobs" and HASH.fullmatch(target.name))
    ]
    if problems:
        raise JaxparError(*problems)


def copy_small_files(source: Path, to: Path, *, names: tuple[str, ...] = SMALL_FILES) -> list[Path]:
    """Copies the small files of a folder, except files that are too large; returns the copies.

    Args:
      source: The folder.
      to: Output folder; created if missing.
      names: Glob patterns of the files.

    Raises:
      JaxparError: If one cannot be read or written, or `check_links` refuses it.
    """
    check_links(source, names=names)
    files = _small_files(source, names)
    try:
        to.mkdir(parents=True, exist_ok=True)
        small = [path for path in files if path.stat().st_size <= MOST]
        return [Path(shutil.copyfile(path, to / path.name)) for path in small]
    except OSError as error:
        raise refuse(
            f"{source} to {to}: {error.strerror}",
            rule="the tokenizer of a model goes along with it",
            fix="a folder that can be read, and one that can be written, with room",
        ) from error


def model_table(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the `[model]` table of a decoder with these settings, which the job's own keys override."""
    return {"name": "decoder", **settings, **{key: value for key, value in overrides.items() if key != "name"}}
