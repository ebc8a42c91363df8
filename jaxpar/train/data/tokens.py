"""Text becomes one file of tokens, memmapped; documents are set apart by token 0."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import refuse, users_code
from jaxpar.train.checkpoint import make_folder

END = 0  # between documents; as a byte it does not occur in text, as a bpe token it is "<end>"


def pack(texts: list[bytes], tokenizer: Any, folder: Path, name: str) -> tuple[Path, type]:
    """Returns the file of all tokens and their dtype; the file is written once per text and tokenizer.

    Args:
      texts: Documents, utf-8.
      tokenizer: From `train_bpe`, or None for bytes.
      folder: Where the file goes.
      name: What tells this text and tokenizer apart.
    """
    dtype = np.uint8 if tokenizer is None else np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    file = folder / f"tokens-{name}.bin"
    if file.exists():
        return file, dtype
    make_folder(folder)
    part = file.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as out:
        for text in texts:
            if tokenizer is None:
                ids = np.frombuffer(text.replace(b"\0", b"") + b"\0", np.uint8)
            else:
                ids = np.array([*tokenizer.encode(text.decode("utf-8", errors="replace")).ids, END], dtype)
            out.write(ids.tobytes())
    part.rename(file)
    return file, dtype


def train_bpe(texts: list[bytes], vocab: int, folder: Path, digest: str) -> Any:
    """Returns a byte-level BPE trained on the texts, from `folder` if it was trained before.

    Raises:
      JaxparError: If the package `tokenizers` is missing, or the text is too small for the vocabulary.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise refuse(
            "data.tokenizer = 'bpe' without the package tokenizers",
            rule="the encoding is trained by Hugging Face's tokenizers",
            fix="pip install 'jaxpar[text]', or tokenizer = 'bytes'",
        ) from error
    file = folder / f"bpe-{vocab}-{digest}.json"
    if file.exists():
        return load_bpe(file)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8", errors="replace") for text in texts), trainer)
    if tokenizer.get_vocab_size() > vocab:
        raise refuse(f"data.vocab = {vocab}", rule="a byte-level bpe has at least 257 tokens", fix="vocab = 1024")
    make_folder(folder)
    part = file.with_suffix(f".{os.getpid()}.part")
    tokenizer.save(str(part))
    part.replace(file)
    return tokenizer


def load_bpe(file: Path) -> Any:
    """Returns the tokenizer in a file of JSON, which holds words and numbers and nothing that runs.

    Raises:
      JaxparError: If it is damaged.
    """
    from tokenizers import Tokenizer

    # the package raises a bare Exception for whatever it cannot read
    with users_code(str(file), rule="a tokenizer is as it was saved", fix=f"rm {file}, and train anew"):
        return Tokenizer.from_file(str(file))


class Text:
    """Text to tokens and back, as a run was trained.

    Args:
      folder: The run's data folder.
      kind: bytes or bpe.
    """

    def __init__(self, folder: Path, kind: str):
        self.bpe = None
        if kind == "bpe":
            files = sorted(folder.glob("bpe-*.json"))
            if not files:
                raise refuse(
                    f"no tokenizer in {folder}",
                    rule="a run keeps its tokenizer",
                    fix="give the run folder that was trained",
                )
            self.bpe = load_bpe(files[-1])

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(text.encode(errors="surrogateescape")) if self.bpe is None else self.bpe.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens; bytes that are no utf-8 are shown as the replacement character."""
        return bytes(tokens).decode("utf-8", errors="replace") if self.bpe is None else self.bpe.decode(tokens)
