"""What a folder of Hugging Face's holds besides weights: its config, its tokenizer, and how it generates text.

These small files go along: into the run that begins with the folder, and into what is exported of it.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse
from jaxpar.files import check_plain

CONFIG, GENERATION = "config.json", "generation_config.json"
# a tokenizer of Hugging Face's is saved as these; SentencePiece's is a .model
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken")
ALONG = (
    *TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
    GENERATION,
)  # fmt: skip
# keys of a config that say which tokens begin, end and fill a text
EOS = "eos_token_id"
SPECIAL = ("bos_token_id", EOS, "pad_token_id")
MOST = 2**28  # bytes of a file that goes along


def is_folder(path: str | Path) -> bool:
    """Returns whether a path is a folder of Hugging Face's."""
    try:
        return bool(path) and (Path(path).expanduser() / CONFIG).is_file()
    except (OSError, RuntimeError, ValueError):  # too long, of a user that there is not, or with a null byte
        return False


def read_config(file: Path) -> dict[str, Any]:
    """Returns a config.json.

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
    """Returns the ids of special tokens that a folder's config names, those that are there."""
    config = read_config(folder / CONFIG) if is_folder(folder) else {}
    return {key: config[key] for key in SPECIAL if config.get(key) is not None}


def end_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text: of generation_config.json if it names them, as in transformers, or of config.

    Models that chat end a turn with another token than a text, and name both in generation_config.json alone.
    """
    file = folder / GENERATION
    said = read_config(file).get(EOS) if file.is_file() else None
    found = special_ids(folder).get(EOS) if said is None else said
    return tuple(each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int))


def take_along(source: Path, to: Path, *, names: tuple[str, ...] = ALONG) -> list[Path]:
    """Copies the small files of a folder, links and what is too large left out; returns the copies.

    Args:
      source: The folder.
      to: Another one, which is made.
      names: Which of its files, as patterns.

    Raises:
      JaxparError: If one cannot be read or written.
    """
    found = sorted({path for name in names for path in source.glob(name) if path.is_file() and not path.is_symlink()})
    try:
        to.mkdir(parents=True, exist_ok=True)
        small = [path for path in found if path.stat().st_size <= MOST]
        return [Path(shutil.copyfile(path, to / path.name)) for path in small]
    except OSError as error:
        raise refuse(
            f"{source} to {to}: {error.strerror}",
            rule="the tokenizer of a model goes along with it",
            fix="a folder that can be read, and one that can be written, with room",
        ) from error


def described(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `[model]` table of a decoder with these settings, and what the job says besides."""
    return {"name": "decoder", **settings, **{key: value for key, value in given.items() if key != "name"}}
