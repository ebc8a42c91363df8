"""Documents to tokens: by a tokenizer of Hugging Face's, by a bpe trained on the text, or as bytes.

An encoder is given many pieces at once, which threads of `tokenizers` share, and returns the tokens of each in their
order: those of a document's pieces, one after the other, are the tokens of the document.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxpar.data.documents.piece import Piece
from jaxpar.data.tokenizers.marks import dtype_of, mark
from jaxpar.data.tokenizers.saved import Saved
from jaxpar.errors import nearest, refuse, users_code

END = 0  # between documents of bytes or of our own bpe: no text has the byte, and the token is "<end>"


class Encoder(Protocol):
    """Makes tokens of documents."""

    dtype: np.dtype

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Returns the tokens of each piece, in `dtype`, marked."""
        ...

    def seam(self, left: str, right: str) -> int | None:
        """Returns how many characters are left out where a document is cut between two texts; None if it cannot be."""
        ...


class Plain:
    """Documents as bytes or in a bpe of one's own, each ended by token 0.

    Args:
      bpe: The bpe; None for bytes.
      size: How many tokens there are.
    """

    def __init__(self, bpe: Any, size: int):
        self.bpe, self.dtype = bpe, dtype_of(size)

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Returns the tokens of each piece, marked."""
        if self.bpe is None:
            found = [
                np.frombuffer(each.text.encode("utf-8", "replace").replace(b"\0", b""), np.uint8) for each in pieces
            ]
        else:
            made = self.bpe.encode_batch_fast([each.text for each in pieces], add_special_tokens=False)
            found = [np.array(each.ids, np.uint32) for each in made]
        ended = [
            np.append(ids, ids.dtype.type(END)) if each.last else ids for ids, each in zip(found, pieces, strict=True)
        ]
        return [mark(ids, self.dtype, first=each.first) for ids, each in zip(ended, pieces, strict=True)]

    def seam(self, left: str, right: str) -> int:
        """Returns 0: a byte-level bpe starts a new word at a space that follows something else."""
        return 0


class HuggingFace:
    """Documents as a tokenizer of Hugging Face's makes them, and each ended by its end-of-sequence token.

    A text gets the special tokens that the tokenizer puts around it, and then the end of sequence, if that is not there
    already. What a template has rendered gets none: the template writes them. Both as transformers does.

    Args:
      saved: The tokenizer.
      end: The text of the token that ends a document; "" means the folder's `eos_token`.
    """

    def __init__(self, saved: Saved, end: str = ""):
        self.tokenizer, self.dtype = load(saved), dtype_of(saved.size)
        self.before, self.after = around(saved, self.tokenizer)
        self.end = end_of(saved, end)

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Returns the tokens of each piece, marked."""
        texts = [each.text for each in pieces]
        if any(each.answers is not None for each in pieces):
            made = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        else:
            made = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._marked(each, found) for each, found in zip(pieces, made, strict=True)]

    def _marked(self, piece: Piece, found: Any) -> np.ndarray:
        ids = found.ids
        if piece.answers is not None:
            learned = _within(np.array(found.offsets, np.int64).reshape(-1, 2), piece.answers)
            return mark(np.array(ids, np.uint32), self.dtype, first=piece.first, learned=learned)
        if not piece.rendered:
            ids = [*(self.before if piece.first else ()), *ids, *(self.after if piece.last else ())]
            if piece.last and self.end is not None and ids[-1:] != [self.end]:
                ids.append(self.end)
        return mark(np.array(ids, np.uint32), self.dtype, first=piece.first)

    def seam(self, left: str, right: str) -> int | None:
        """Returns how many characters are left out at a cut, as both sides encoded alone show; None if it changes them.

        A tokenizer that puts a space before every text takes the space at the cut for its own.
        """
        whole = self._ids(left + right)
        for drop in (0, 1):
            if self._ids(left) + self._ids(right[drop:]) == whole:
                return drop
        return None

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def end_of(saved: Saved, end: str) -> int:
    """Returns the id of the token that ends a document.

    Raises:
      JaxparError: If it is no token, or nothing names one.
    """
    if end:
        if end not in saved.ids:
            fix = nearest(end, saved.added, otherwise=f"one of: {_listed(saved)}, or leave it out")
            raise refuse(f"data.end = {end!r}", rule=f"data.end is a token of {saved.file}", fix=fix)
        return saved.ids[end]
    found = saved.id_of("eos_token")
    if found is None:
        known = _listed(saved)
        raise refuse(
            f"{saved.file.parent} names no eos_token",
            rule="a token ends each document: eos_token beside tokenizer.json, or data.end",
            fix=f"data.end = one of: {known}" if known else "a tokenizer with special tokens",
        )
    return found


def _listed(saved: Saved) -> str:
    """Returns the first special and added tokens, which may end a document."""
    return ", ".join(list(dict.fromkeys([*saved.special.values(), *saved.added]))[:8])


def load(saved: Saved) -> Any:
    """Returns the tokenizer as the package `tokenizers` runs it, without padding and truncation.

    Raises:
      JaxparError: If the package is missing, or cannot read the file.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, pre_tokenizers
    except ModuleNotFoundError as error:
        raise refuse(
            f"data.tokenizer = '{saved.file}' without the package tokenizers",
            rule="tokenizers of Hugging Face's run in the package of that name",
            fix="pip install 'jaxpar[text]'",
        ) from error
    # the package raises a bare Exception for whatever it cannot read
    with users_code(str(saved.file), rule="a tokenizer is as `tokenizers` saved it", fix="save it anew"):
        made = Tokenizer.from_file(str(saved.file))
    made.no_padding()
    made.no_truncation()
    if not saved.config:
        return made
    # as transformers 4.57 completes a tokenizer.json by its config (tokenization_utils_fast.py, line 174 on)
    for number, each in sorted(dict(saved.config.get("added_tokens_decoder") or {}).items(), key=lambda it: int(it[0])):
        if made.token_to_id(each["content"]) is None and int(number) == made.get_vocab_size():
            made.add_tokens([AddedToken(**{key: value for key, value in each.items() if key != "__type"})])
    state = json.loads(saved.file.read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    wanted = saved.config.get("add_prefix_space", False)
    if state.get("add_prefix_space", wanted) != wanted:
        settings = {key: value for key, value in state.items() if key != "type"} | {"add_prefix_space": wanted}
        made.pre_tokenizer = getattr(pre_tokenizers, state["type"])(**settings)
    return made


def around(saved: Saved, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the special tokens before and after a text: by the keys of some classes, else by tokenizer.json."""
    if saved.around is not None:
        return tuple(
            [found] if wanted and (found := saved.id_of(key)) is not None else []
            for key, wanted in zip(("bos_token", "eos_token"), saved.around, strict=True)
        )  # pyright: ignore[reportReturnType]
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for begin in range(len(whole) - len(bare) + 1):
        if whole[begin : begin + len(bare)] == bare:
            return whole[:begin], whole[begin + len(bare) :]
    raise refuse(
        f"{saved.file} makes {whole} of 'a' with special tokens, {bare} without",
        rule="special tokens go before and after a text",
        fix="a tokenizer with a post_processor of that kind",
    )


def _within(offsets: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns which tokens hold a character of an answer. Shape [n], bool."""
    learned = np.zeros(len(offsets), bool)
    for begin, end in answers:
        learned |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    return learned
