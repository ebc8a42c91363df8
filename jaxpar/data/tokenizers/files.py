"""Reads the files of a tokenizer's folder as JSON and text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse
from jaxpar.files import check_plain

NAME, CONFIG, MAP, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


MOST = 2048  # cap on the default data.seq of conversations: rows of 131,072 tokens would fit no device


def context_length(tokenizer: str) -> int:
    """Context length of the model in a tokenizer's folder, at most 2,048; 2,048 if no file names it."""
    folder = Path(tokenizer).expanduser()
    for name, key in (("config.json", "max_position_embeddings"), (CONFIG, "model_max_length")):
        try:
            number = json.loads((folder / name).read_text(encoding="utf-8")).get(key)
        except (OSError, ValueError, AttributeError):  # the readers of these files report what is wrong
            continue
        if isinstance(number, int) and number > 0:
            return min(number, MOST)
    return MOST


def read_ids(file: Path, config: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the ids of the added tokens and those of the vocabulary, from a tokenizer.json and its config.

    Raises:
      JaxparError: If it has no vocabulary, or a token is malformed.
    """
    contents = read_json(file)
    model = contents.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not vocab:
        raise _damaged(file, "it has no model.vocab")
    try:
        added = {entry["content"]: int(entry["id"]) for entry in contents.get("added_tokens") or []}
        for number, entry in dict(config.get("added_tokens_decoder") or {}).items():
            added.setdefault(entry["content"], int(number))
        # a Unigram vocabulary is a list of [text, score]
        ids = vocab if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
        max(ids.values())
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise _damaged(file, f"{error} among its tokens") from error
    return added, ids


def read_config(file: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json beside a tokenizer.json, completed by special_tokens_map.json.

    Raises:
      JaxparError: If either is damaged.
    """
    existing = (path for path in (file.with_name(MAP), file.with_name(CONFIG)) if path.is_file())
    return {key: value for path in existing for key, value in read_json(path).items()}


def read_template(file: Path, config: Mapping[str, Any]) -> str:
    """Reads the chat template beside a tokenizer.json or in its config; "" if there is none."""
    template_file = file.with_name(TEMPLATE)
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several templates by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template", "") for entry in entries if entry.get("name") == "default"), "")
    if not isinstance(template, str):
        raise _damaged(file.with_name(CONFIG), f"chat_template is {template!r:.60}, and no text")
    return template


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      JaxparError: If it cannot be read, or is not an object.
    """
    check_plain(file, rule="a tokenizer is saved as JSON by Hugging Face's tokenizers", fix="save it anew")
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, getattr(error, "strerror", None) or str(error)) from error
    if not isinstance(contents, dict):
        raise _damaged(file, "it is no object")
    return contents


def _damaged(file: Path, why: str) -> Exception:
    return refuse(
        f"{file}: {why}",
        rule="a tokenizer is saved as JSON by Hugging Face's tokenizers",
        fix="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it anew",
    )
