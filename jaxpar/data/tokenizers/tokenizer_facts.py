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

from jaxpar.data.tokenizers.files import CONFIG, MAP, NAME, TEMPLATE, read_config, read_ids, read_template
from jaxpar.errors import refuse, suggest
from jaxpar.files import partial_path

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# classes of transformers 4.57 whose add_bos_token and add_eos_token override tokenizer.json, with the default of bos
ADDED = {"LlamaTokenizer": True, "CodeLlamaTokenizer": True, "CohereTokenizer": True, "GemmaTokenizer": True,
         "GPTNeoXTokenizer": False}  # fmt: skip
MORE, SHARE = 1024, 0.03  # embedding rows beyond the tokenizer's size that count as padding
PADDING = f"at most {MORE}, or {SHARE:.0%} of the tokens"


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer on disk.

    Attributes:
      file: Its tokenizer.json.
      size: Size of the vocabulary: the highest id plus 1.
      ids: Text to id of every token.
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
        usual = ADDED.get(str(self.config.get("tokenizer_class", "")).removesuffix("Fast"))
        if usual is None:
            return None
        return bool(self.config.get("add_bos_token", usual)), bool(self.config.get("add_eos_token", False))

    def id_of(self, key: str) -> int | None:
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
        raise _none(path, str(error)) from error
    if file not in files:
        legacy = location.is_dir() and any(any(location.glob(name)) for name in ("vocab.json", "*.model", "*.tiktoken"))
        reason = "no tokenizer.json there" if location.exists() else "no such file or folder"
        raise _none(path, reason + ", only files of an older kind" * legacy)
    return _read(file, stamps)


def _none(path: str | Path, why: str) -> Exception:
    return refuse(
        f"data.tokenizer = {str(path)!r}: {why}",
        rule='a tokenizer is "bytes", "bpe", a tokenizer.json or a folder with one',
        fix="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it"
        if "older kind" in why
        else 'tokenizer = "bytes", or the folder of the model',
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


def _text(value: Any) -> str:
    """Text of a special token, which is a string or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""
