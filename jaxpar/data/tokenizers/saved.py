"""A tokenizer on the disk, as Hugging Face saves one, and what its folder says about special tokens.

tokenizer.json            the tokenizer itself, read by the package `tokenizers`
tokenizer_config.json     bos_token, eos_token, add_bos_token, add_eos_token, chat_template
special_tokens_map.json   the same tokens, where the file above does not name them
chat_template.jinja       the template, in newer folders

Only tokenizer.json must be there. Nothing is imported here but the JSON reader: a job is checked without the package.
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
from jaxpar.errors import nearest, refuse
from jaxpar.files import partial_path

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# classes of transformers 4.57 that put special tokens around a text by their own two keys, whatever tokenizer.json says
ADDED = {"LlamaTokenizer": True, "CodeLlamaTokenizer": True, "CohereTokenizer": True, "GemmaTokenizer": True,
         "GPTNeoXTokenizer": False}  # fmt: skip
MORE, SHARE = 1024, 0.03  # rows of a vocabulary beyond the tokenizer's that padding explains
PADDING = f"at most {MORE}, or {SHARE:.0%} of the tokens"


@dataclass(frozen=True)
class Saved:
    """A tokenizer on the disk.

    Attributes:
      file: Its tokenizer.json.
      size: Tokens: one more than the highest id.
      ids: Of all tokens, by their text.
      added: Texts of the special and added tokens.
      config: What tokenizer_config.json says, completed by special_tokens_map.json.
      template: The chat template, or "".
      digest: Of all that decides the tokens.
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
        found = {key: _text(self.config.get(key)) for key in SPECIAL}
        return {key: text for key, text in found.items() if text}

    @property
    def around(self) -> tuple[bool, bool] | None:
        """Whether bos and eos go around a text; None where tokenizer.json decides."""
        usual = ADDED.get(str(self.config.get("tokenizer_class", "")).removesuffix("Fast"))
        if usual is None:
            return None
        return bool(self.config.get("add_bos_token", usual)), bool(self.config.get("add_eos_token", False))

    def id_of(self, key: str) -> int | None:
        """Returns the id of a special token, such as `eos_token`; None where the folder names none.

        Raises:
          JaxparError: If it names a token that the tokenizer does not have.
        """
        text = self.special.get(key)
        if text is None:
            return None
        if text not in self.ids:
            raise refuse(
                f"{key} = {text!r} of {self.file.parent}",
                rule="a special token is a token of tokenizer.json",
                fix=nearest(text, self.ids),
            )
        return self.ids[text]

    def copy(self, folder: Path) -> None:
        """Copies what is needed to read it again into a folder; a file that is there already is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (NAME, CONFIG, MAP, TEMPLATE):
            source = self.file if name == NAME else self.file.with_name(name)
            if source.is_file():
                part = partial_path(folder / name)
                try:
                    shutil.copyfile(source, part)
                    part.replace(folder / name)
                finally:
                    part.unlink(missing_ok=True)

    def check_model(self, vocab: int, key: str = "model.vocab") -> None:
        """Checks that a model has a row for every token, and no more than padding explains.

        Vocabularies are padded so that devices divide them: Qwen's by 271 rows, Phi-2's by 905, DeepSeek-V2's by 2.4 %.

        Raises:
          JaxparError: If it has fewer rows, or many more.
        """
        if not self.size <= vocab <= most_rows(self.size):
            few = vocab < self.size
            raise refuse(
                f"{key} = {vocab}, the tokenizer {self.file} has {self.size} tokens",
                rule="the model has a row for every token" if few else f"rows beyond the tokens are padding: {PADDING}",
                fix=f"{key} = {self.size}, or the tokenizer that the model was trained with",
            )


def most_rows(tokens: int) -> int:
    """Returns the rows of the largest vocabulary of so many tokens that padding explains."""
    return tokens + max(MORE, int(SHARE * tokens))


def saved(path: str | Path) -> Saved:
    """Returns the tokenizer at a path: a tokenizer.json, or a folder that has one.

    Raises:
      JaxparError: If there is none, or it cannot be read.
    """
    try:
        at = Path(path).expanduser()
        file = at / NAME if at.is_dir() else at
        files = tuple(each for each in (file, *map(file.with_name, (CONFIG, MAP, TEMPLATE))) if each.is_file())
        stamps = tuple(each.stat().st_mtime_ns for each in files)
    except (OSError, ValueError, RuntimeError) as error:
        raise _none(path, str(error)) from error
    if file not in files:
        slow = at.is_dir() and any(any(at.glob(name)) for name in ("vocab.json", "*.model", "*.tiktoken"))
        why = "no tokenizer.json there" if at.exists() else "no such file or folder"
        raise _none(path, why + ", only files of an older kind" * slow)
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
def _read(file: Path, stamps: tuple[int, ...]) -> Saved:
    config = read_config(file)
    added, own = read_ids(file, config)
    template = read_template(file, config)
    said = {key: config.get(key) for key in (*SPECIAL, "tokenizer_class", "add_bos_token", "add_eos_token")}
    said |= {"template": template, "prefix": config.get("add_prefix_space")}
    digest = hashlib.sha256(file.read_bytes() + json.dumps(said, sort_keys=True, default=str).encode())
    return Saved(
        file=file,
        size=1 + max([*added.values(), max(own.values())]),
        ids=ChainMap(added, own),
        added=tuple(added),
        config=config,
        template=template,
        digest=digest.hexdigest()[:16],
    )


def _text(value: Any) -> str:
    """Returns the text of a special token, which is a string or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""
