"""The built-in tokenizers (bytes, and a byte-level BPE trained on the text); token 0 separates documents."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.corpus import Corpus, blocks, pieces
from jaxpar.data.tokenizers.encoders import END, enclosing_tokens, load
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError, refuse, user_code_errors
from jaxpar.files import partial_path, sync

TOKENIZER_FOLDER = "tokenizer"  # the folder in RUN/data that holds the run's copy of a Hugging Face tokenizer
AT_ONCE = 16  # pieces per call of the tokenizer's threads; their tokens take ten times the memory of their bytes


def byte_tokens(corpus: Corpus, read: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the bytes of each document as tokens, without zero bytes, and a zero after each document.

    Args:
      corpus: The text.
      read: Called with the number of bytes after each block.
    """
    for file in corpus.files:
        for block in blocks(file):
            yield block.replace(b"\0", b"")
            read(len(block))
        yield b"\0"


def bpe_tokens(corpus: Corpus, tokenizer: Any, dtype: np.dtype, read: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the tokens of a text in order; the tokenizer encodes several pieces in parallel."""
    end = np.array([END], dtype).tobytes()
    file_pieces = ((file, piece) for file in corpus.files for piece in chain(pieces(file), (None,)))
    while group := list(islice(file_pieces, AT_ONCE)):
        texts = [piece for _, piece in group if piece is not None]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        yield b"".join(end if piece is None else np.array(next(encoded).ids, dtype).tobytes() for _, piece in group)
        read(sum(len(text.encode("utf-8", "replace")) for text in texts))


def bpe_file(folder: Path, vocab: int, digest: str) -> Path:
    """Path of the BPE that was trained on the text with this digest."""
    return folder / f"bpe-{vocab}-{digest}.json"


def train_bpe(corpus: Corpus, vocab: int, file: Path, on_read: Callable[[int], None]) -> Any:
    """Trains a byte-level BPE on a text and saves it.

    Args:
      corpus: The text.
      vocab: Maximum number of tokens.
      file: The file to save it to.
      on_read: Called with the number of bytes of each piece.

    Raises:
      JaxparError: If the package `tokenizers` is missing, or the vocabulary is smaller than 257.
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
            on_read(piece.size)

    tokenizer.train_from_iterator(texts(), trainer)
    if tokenizer.get_vocab_size() > vocab:
        raise refuse(f"data.vocab = {vocab}", rule="a byte-level bpe has at least 257 tokens", fix="vocab = 1024")
    partial = partial_path(file)
    tokenizer.save(str(partial))
    sync(partial)
    partial.replace(file)
    sync(file.parent)
    return tokenizer


def load_bpe(file: Path) -> Any:
    """Loads a tokenizer from its JSON file, which holds no executable code.

    Raises:
      JaxparError: If the file is damaged.
    """
    from tokenizers import Tokenizer

    # the package raises a bare Exception for whatever it cannot read
    with user_code_errors(str(file), rule="a tokenizer is as it was saved", fix=f"rm {file}, and train anew"):
        return Tokenizer.from_file(str(file))


class RunTokenizer:
    """Encodes and decodes text with the tokenizer of a trained run.

    Args:
      folder: The run's data folder.
      kind: bytes, bpe or the path of a Hugging Face tokenizer; the run's copy of it is read.
    """

    def __init__(self, folder: Path, kind: str):
        self.bpe, self._before, self._size = None, [], 256
        if kind == "bpe":
            files = sorted(folder.glob("bpe-*.json"))
            if not files:
                raise _no_tokenizer_error(folder)
            self.bpe = load_bpe(files[-1])
            self._size = self.bpe.get_vocab_size()
        elif kind != "bytes":
            if not (folder / TOKENIZER_FOLDER).is_dir():
                raise _no_tokenizer_error(folder)
            facts = read_tokenizer(folder / TOKENIZER_FOLDER)
            self.bpe, self._size = load(facts), facts.size
            self._before = enclosing_tokens(facts, self.bpe)[0]

    @property
    def size(self) -> int:
        """The number of token ids; a padded model may have more."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """Encodes the beginning of a document: special tokens that go before a text are included."""
        if self.bpe is None:
            return list(text.encode(errors="surrogateescape"))
        return [*self._before, *self.bpe.encode(text, add_special_tokens=False).ids]

    def special(self, text: str) -> int | None:
        """Returns the id of a special token, one that decodes to no text; None if there is none of this name."""
        token = None if self.bpe is None else self.bpe.token_to_id(text)
        return token if token is not None and not self.decode([token]) else None

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens; invalid UTF-8 becomes the replacement character."""
        return bytes(tokens).decode("utf-8", errors="replace") if self.bpe is None else self.bpe.decode(tokens)


def _no_tokenizer_error(folder: Path) -> JaxparError:
    return refuse(
        f"no tokenizer in {folder}",
        rule="the folder of a run has a copy of its tokenizer",
        fix="the folder of a run that was trained",
    )
