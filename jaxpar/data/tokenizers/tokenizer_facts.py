"""Reads the facts of a Hugging Face tokenizer on disk: ids, special tokens, chat template and a hash.

tokenizer.json            the tokenizer itself, read by the package `tokenizers`
tokenizer_config.json     bos_token, eos_token, add_bos_token, add_eos_token, chat_template
special_tokens_map.json   the same tokens, where the file above does not name them
chat_template.jinja       the template, in newer folders

Only tokenizer.json is required. The files are read as JSON, so a job is checked without the package `tokenizers`.
"""

import hashlib
import json
import shutil
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse, suggest
from jaxpar.files import check_plain, partial_path

# Reads the files of a tokenizer's folder as JSON and text.

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
        raise _damaged_error(file, "it has no model.vocab")
    try:
        added = {entry["content"]: int(entry["id"]) for entry in contents.get("added_tokens") or []}
        for number, entry in dict(config.get("added_tokens_decoder") or {}).items():
            added.setdefault(entry["content"], int(number))
        # a Unigram vocabulary is a list of [text, score]
        ids = vocab if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
        max(ids.values())
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise _damaged_error(file, f"{error} among its tokens") from error
    return added, ids


def read_config(file: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json beside a tokenizer.json, completed by special_tokens_map.json.

    Raises:
      JaxparError: If either is damaged.
    """
    existing = (path for path in (file.with_name(MAP), file.with_name(CONFIG)) if path.is_file())
    return {key: value for path in existing for key, value in read_json(path).items()}


def read_template(file: Path, config: Mapping[str, object]) -> str:
    """Reads the chat template beside a tokenizer.json or in its config; "" if there is none."""
    template_file = file.with_name(TEMPLATE)
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several templates by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template", "") for entry in entries if entry.get("name") == "default"), "")
    if not isinstance(template, str):
        raise _damaged_error(file.with_name(CONFIG), f"chat_template is {template!r:.60}, and no text")
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
        raise _damaged_error(file, getattr(error, "strerror", None) or str(error)) from error
    if not isinstance(contents, dict):
        raise _damaged_error(file, "it is no object")
    return contents


def _damaged_error(file: Path, why: str) -> Exception:
    return refuse(
        f"{file}: {why}",
        rule="a tokenizer is saved as JSON by Hugging Face's tokenizers",
        fix="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it anew",
    )


SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# classes of transformers 4.57 whose add_bos_token and add_eos_token override tokenizer.json, with the default of bos
BOS_DEFAULTS = {"LlamaTokenizer": True, "CodeLlamaTokenizer": True, "CohereTokenizer": True, "GemmaTokenizer": True,
         "GPTNeoXTokenizer": False}  # fmt: skip
MORE, SHARE = 1024, 0.03  # embedding rows beyond the tokenizer's size that count as padding
PADDING = f"at most {MORE}, or {SHARE:.0%} of the tokens"


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer on disk.

    Attributes:
      file: Its tokenizer.json.
      size: Size of the vocabulary: the highest id plus 1.
      ids: The id of every token, by its text.
      added: Texts of the special and added tokens.
      config: tokenizer_config.json, completed by special_tokens_map.json.
      template: The chat template, or "".
      digest: Hash of every input that decides the tokens.
    """

    file: Path
    size: int
    ids: Mapping[str, int]
    added: tuple[str, ...]
    config: Mapping[str, Any]
    template: str
    digest: str

    @property
    def special(self) -> dict[str, str]:
        """The special tokens that a template may name, such as `bos_token`."""
        texts = {key: _text(self.config.get(key)) for key in SPECIAL}
        return {key: text for key, text in texts.items() if text}

    @property
    def adds_bos_eos(self) -> tuple[bool, bool] | None:
        """Whether bos and eos are added around a text; None if tokenizer.json decides."""
        usual = BOS_DEFAULTS.get(str(self.config.get("tokenizer_class", "")).removesuffix("Fast"))
        if usual is None:
            return None
        return bool(self.config.get("add_bos_token", usual)), bool(self.config.get("add_eos_token", False))

    def special_id(self, key: str) -> int | None:
        """Returns the id of a special token, such as `eos_token`; None if the folder names none.

        Raises:
          JaxparError: If the folder names a token that is not in the vocabulary.
        """
        text = self.special.get(key)
        if text is None:
            return None
        if text not in self.ids:
            raise refuse(
                f"{key} = {text!r} of {self.file.parent}",
                rule="a special token is a token of tokenizer.json",
                fix=suggest(text, self.ids),
            )
        return self.ids[text]

    def copy(self, folder: Path) -> None:
        """Copies the tokenizer's files into a folder; existing files are replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (NAME, CONFIG, MAP, TEMPLATE):
            source = self.file if name == NAME else self.file.with_name(name)
            if source.is_file():
                partial = partial_path(folder / name)
                try:
                    shutil.copyfile(source, partial)
                    partial.replace(folder / name)
                finally:
                    partial.unlink(missing_ok=True)

    def check_model(self, vocab: int, key: str = "model.vocab") -> None:
        """Checks that a model has an embedding row for every token, and not more rows than padding explains.

        Vocabularies are padded to divide over devices: Qwen's by 271 rows, Phi-2's by 905, DeepSeek-V2's by 2.4 %.

        Raises:
          JaxparError: If `vocab` is smaller than the tokenizer, or larger than padding explains.
        """
        if not self.size <= vocab <= most_rows(self.size):
            few = vocab < self.size
            raise refuse(
                f"{key} = {vocab}, the tokenizer {self.file} has {self.size} tokens",
                rule="the model has a row for every token" if few else f"rows beyond the tokens are padding: {PADDING}",
                fix=f"{key} = {self.size}, or the tokenizer that the model was trained with",
            )


def most_rows(tokens: int) -> int:
    """Largest model vocabulary that counts as padded, for a tokenizer of this size."""
    return tokens + max(MORE, int(SHARE * tokens))


def read_tokenizer(path: str | Path) -> TokenizerFacts:
    """Reads the tokenizer at a path: a tokenizer.json, or a folder with one.

    Raises:
      JaxparError: If there is none, or it cannot be read.
    """
    try:
        location = Path(path).expanduser()
        file = location / NAME if location.is_dir() else location
        files = tuple(item for item in (file, *map(file.with_name, (CONFIG, MAP, TEMPLATE))) if item.is_file())
        stamps = tuple(item.stat().st_mtime_ns for item in files)
    except (OSError, ValueError, RuntimeError) as error:
        raise _no_tokenizer_error(path, str(error)) from error
    if file not in files:
        legacy = location.is_dir() and any(any(location.glob(name)) for name in ("vocab.json", "*.model", "*.tiktoken"))
        reason = "no tokenizer.json there" if location.exists() else "no such file or folder"
        raise _no_tokenizer_error(path, reason + ", only files of an older kind" * legacy)
    return _read(file, stamps)


def _no_tokenizer_error(path: str | Path, why: str) -> Exception:
    from jaxpar.models.huggingface.folder import hub_download  # only this error needs it

    download = hub_download(str(path)) if "no such file" in why else None
    download_first = f'{download[0]}, and tokenizer = "{download[1]}"; or ' if download else ""
    return refuse(
        f"data.tokenizer = {str(path)!r}: {why}",
        rule='a tokenizer is "bytes", "bpe", a tokenizer.json or a folder with one',
        fix="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it"
        if "older kind" in why
        else f"{download_first}a folder with a tokenizer.json, such as the model's; or "
        'tokenizer = "bytes", for text without messages',
    )


@lru_cache(maxsize=8)
def _read(file: Path, stamps: tuple[int, ...]) -> TokenizerFacts:
    config = read_config(file)
    added, vocab = read_ids(file, config)
    template = read_template(file, config)
    facts = {key: config.get(key) for key in (*SPECIAL, "tokenizer_class", "add_bos_token", "add_eos_token")}
    facts |= {"template": template, "prefix": config.get("add_prefix_space")}
    digest = hashlib.sha256(file.read_bytes() + json.dumps(facts, sort_keys=True, default=str).encode())
    return TokenizerFacts(
        file=file,
        size=1 + max([*added.values(), max(vocab.values())]),
        ids=ChainMap(added, vocab),
        added=tuple(added),
        config=config,
        template=template,
        digest=digest.hexdigest()[:16],
    )


def _text(value: object) -> str:
    """Text of a special token, which is a string or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""
