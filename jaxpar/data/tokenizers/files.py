"""The files of a tokenizer's folder, read as JSON and text."""

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


MOST = 2048  # tokens of a conversation, where nobody says how many: rows of 131,072 would fit nowhere


def positions(tokenizer: str) -> int:
    """Returns the tokens that the model of a tokenizer's folder takes: 2,048 at most, or where it does not say."""
    folder = Path(tokenizer).expanduser()
    for name, key in (("config.json", "max_position_embeddings"), (CONFIG, "model_max_length")):
        try:
            number = json.loads((folder / name).read_text(encoding="utf-8")).get(key)
        except (OSError, ValueError, AttributeError):  # what is wrong with them is said where they are read
            continue
        if isinstance(number, int) and number > 0:
            return min(number, MOST)
    return MOST


def read_ids(file: Path, config: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the ids of the added tokens, and of the vocabulary, of a tokenizer.json and its config.

    Raises:
      JaxparError: If it has none.
    """
    made = read_json(file)
    model = made.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not vocab:
        raise _damaged(file, "it has no model.vocab")
    try:
        added = {each["content"]: int(each["id"]) for each in made.get("added_tokens") or []}
        for number, each in dict(config.get("added_tokens_decoder") or {}).items():
            added.setdefault(each["content"], int(number))
        # of Unigram the vocabulary is a list of [text, score]
        own = vocab if isinstance(vocab, dict) else {each[0]: index for index, each in enumerate(vocab)}
        max(own.values())
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise _damaged(file, f"{error} among its tokens") from error
    return added, own


def read_config(file: Path) -> dict[str, Any]:
    """Returns what the config beside a tokenizer.json says, completed by the map of special tokens.

    Raises:
      JaxparError: If one of them is damaged.
    """
    there = (each for each in (file.with_name(MAP), file.with_name(CONFIG)) if each.is_file())
    return {key: value for each in there for key, value in read_json(each).items()}


def read_template(file: Path, config: Mapping[str, Any]) -> str:
    """Returns the chat template beside a tokenizer.json or in its config, or ""."""
    beside = file.with_name(TEMPLATE)
    if beside.is_file():
        return beside.read_text(encoding="utf-8", errors="replace")
    found = config.get("chat_template") or ""
    if isinstance(found, list):  # several by name, of which one is the usual
        named = [each for each in found if isinstance(each, dict)]
        found = next((each.get("template", "") for each in named if each.get("name") == "default"), "")
    if not isinstance(found, str):
        raise _damaged(file.with_name(CONFIG), f"chat_template is {found!r:.60}, and no text")
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Returns an object of JSON.

    Raises:
      JaxparError: If it cannot be read, or is something else.
    """
    check_plain(file, rule="a tokenizer is saved as JSON by Hugging Face's tokenizers", fix="save it anew")
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, getattr(error, "strerror", None) or str(error)) from error
    if not isinstance(made, dict):
        raise _damaged(file, "it is no object")
    return made


def _damaged(file: Path, why: str) -> Exception:
    return refuse(
        f"{file}: {why}",
        rule="a tokenizer is saved as JSON by Hugging Face's tokenizers",
        fix="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it anew",
    )
