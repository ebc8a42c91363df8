"""Tokenizers, and the tokens of a text: documents are set apart by token 0."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.corpus import Corpus, blocks, pieces
from jaxpar.data.tokenizers.encoders import END, around, load
from jaxpar.data.tokenizers.saved import saved
from jaxpar.errors import JaxparError, refuse, users_code
from jaxpar.files import partial_path, sync

KEPT = "tokenizer"  # the folder in RUN/data where a tokenizer of Hugging Face's is kept
AT_ONCE = 16  # pieces that threads of the tokenizer work on at the same time; their tokens take ten times their bytes


def byte_tokens(corpus: Corpus, read: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the tokens of a text: its bytes, without those that set documents apart.

    Args:
      corpus: The text.
      read: Is told how many bytes of it were packed.
    """
    for file in corpus.files:
        for block in blocks(file):
            yield block.replace(b"\0", b"")
            read(len(block))
        yield b"\0"


def bpe_tokens(corpus: Corpus, tokenizer: Any, dtype: np.dtype, read: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the tokens of a text as a tokenizer makes them: of several pieces in parallel, in their order."""
    end = np.array([END], dtype).tobytes()
    of_files = ((file, piece) for file in corpus.files for piece in chain(pieces(file), (None,)))
    while some := list(islice(of_files, AT_ONCE)):
        texts = [piece for _, piece in some if piece is not None]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        yield b"".join(end if piece is None else np.array(next(encoded).ids, dtype).tobytes() for _, piece in some)
        read(sum(len(text.encode("utf-8", "replace")) for text in texts))


def bpe_file(folder: Path, vocab: int, digest: str) -> Path:
    """Returns where the bpe lies that was trained on a text."""
    return folder / f"bpe-{vocab}-{digest}.json"


def train_bpe(corpus: Corpus, vocab: int, file: Path, read: Callable[[int], None]) -> Any:
    """Returns a byte-level BPE trained on a text; it is on the disk then.

    Args:
      corpus: The text.
      vocab: Tokens, at most.
      file: Where it is saved.
      read: Is told how many bytes were read.

    Raises:
      JaxparError: If the package `tokenizers` is missing, or the vocabulary is too small for it.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise refuse(
            "data.tokenizer = 'bpe' without the package tokenizers",
            rule="the encoding is trained by Hugging Face's tokenizers",
            fix="pip install 'jaxpar[text]', or tokenizer = 'bytes'",
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for piece in corpus.pieces():
            yield piece.text
            read(piece.size)

    tokenizer.train_from_iterator(texts(), trainer)
    if tokenizer.get_vocab_size() > vocab:
        raise refuse(f"data.vocab = {vocab}", rule="a byte-level bpe has at least 257 tokens", fix="vocab = 1024")
    part = partial_path(file)
    tokenizer.save(str(part))
    sync(part)
    part.replace(file)
    sync(file.parent)
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
      kind: bytes, bpe or the path of a tokenizer of Hugging Face's, of which the run has a copy.
    """

    def __init__(self, folder: Path, kind: str):
        self.bpe, self._before, self._size = None, [], 256
        if kind == "bpe":
            files = sorted(folder.glob("bpe-*.json"))
            if not files:
                raise _none(folder)
            self.bpe = load_bpe(files[-1])
            self._size = self.bpe.get_vocab_size()
        elif kind != "bytes":
            if not (folder / KEPT).is_dir():
                raise _none(folder)
            found = saved(folder / KEPT)
            self.bpe, self._size = load(found), found.size
            self._before = around(found, self.bpe)[0]

    @property
    def size(self) -> int:
        """The number of tokens, from 0; a model may have more."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of the beginning of a document."""
        if self.bpe is None:
            return list(text.encode(errors="surrogateescape"))
        return [*self._before, *self.bpe.encode(text, add_special_tokens=False).ids]

    def special(self, text: str) -> int | None:
        """Returns the special token of this name, which no text shows; None where there is none."""
        token = None if self.bpe is None else self.bpe.token_to_id(text)
        return token if token is not None and not self.decode([token]) else None

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens; bytes that are no utf-8 are shown as the replacement character."""
        return bytes(tokens).decode("utf-8", errors="replace") if self.bpe is None else self.bpe.decode(tokens)


def _none(folder: Path) -> JaxparError:
    return refuse(
        f"no tokenizer in {folder}",
        rule="a run keeps its tokenizer",
        fix="give the run folder that was trained",
    )
