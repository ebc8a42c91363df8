"""Encodes documents by a Hugging Face tokenizer, by a BPE trained on the text, or as bytes.

An encoder takes many pieces per call, which the threads of `tokenizers` share, and returns the tokens of each piece in
order. The concatenated tokens of a document's pieces are the tokens of the document.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.data.corpus import Corpus
from jaxpar.data.documents.plain_text import START, DocumentPiece, Place
from jaxpar.data.documents.row_files import RowCorpus
from jaxpar.data.packed import set_flags, token_dtype
from jaxpar.data.spec import OURS, Data
from jaxpar.data.tokenizers.chat_template import load_template
from jaxpar.data.tokenizers.tokenizer_facts import TokenizerFacts, read_tokenizer
from jaxpar.errors import refuse, suggest, user_code_errors

END = 0  # separates documents of bytes or of jaxpar's own BPE: no text has the byte, and the token is "<end>"


class Encoder(Protocol):
    """Encodes pieces of documents."""

    dtype: np.dtype

    def encode(self, pieces: Sequence[DocumentPiece]) -> list[np.ndarray]:
        """Returns the tokens of each piece, in `dtype`, with their flag bits (`marks`)."""
        ...

    def seam(self, left: str, right: str) -> int | None:
        """Returns the length to drop from `right` if a document is cut here; None if the tokens change."""
        ...


class BuiltinEncoder:
    """Documents as bytes or in jaxpar's own BPE, each ended by token 0.

    Args:
      bpe: The BPE; None for bytes.
      size: Size of the vocabulary.
    """

    def __init__(self, bpe: Any, size: int):
        self.bpe, self.dtype = bpe, token_dtype(size)

    def encode(self, pieces: Sequence[DocumentPiece]) -> list[np.ndarray]:
        """Returns the tokens of each piece with their flag bits."""
        if any(item.answers is not None for item in pieces):
            return [self._with_answers(item) for item in pieces]
        if self.bpe is None:
            tokens = [np.frombuffer(_to_bytes(item.text), np.uint8) for item in pieces]
        else:
            encodings = self.bpe.encode_batch_fast([item.text for item in pieces], add_special_tokens=False)
            tokens = [np.array(item.ids, np.uint32) for item in encodings]
        ended = [
            np.append(ids, ids.dtype.type(END)) if item.last else ids for ids, item in zip(tokens, pieces, strict=True)
        ]
        return [set_flags(ids, self.dtype, first=item.first) for ids, item in zip(ended, pieces, strict=True)]

    def _with_answers(self, piece: DocumentPiece) -> np.ndarray:
        """Returns the tokens of a document of which some spans are learned; its end is, if the last span reaches it."""
        answers = piece.answers or ()
        if self.bpe is None:
            ids = np.frombuffer(_to_bytes(piece.text), np.uint8)
            learned = np.zeros(len(ids), bool)
            for begin, end in answers:
                learned[len(_to_bytes(piece.text[:begin])) : len(_to_bytes(piece.text[:end]))] = True
        else:
            encoding = self.bpe.encode(piece.text, add_special_tokens=False)
            ids = np.array(encoding.ids, np.uint32)
            learned = _answer_mask(np.array(encoding.offsets, np.int64).reshape(-1, 2), answers)
        learned = np.append(learned, bool(answers) and answers[-1][1] == len(piece.text))
        return set_flags(np.append(ids, ids.dtype.type(END)), self.dtype, first=piece.first, learned=learned)

    def seam(self, left: str, right: str) -> int:
        """Returns 0, because a byte-level BPE always starts a new word at a space after another character."""
        return 0


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace").replace(b"\0", b"")


class HuggingFaceEncoder:
    """Documents in a Hugging Face tokenizer, each ended by its end-of-sequence token.

    A text gets the special tokens that the tokenizer puts around it, and then the end of sequence unless it is there
    already. A rendered conversation gets none: the template writes them. Both as transformers does.

    Args:
      saved: The tokenizer.
      end: Text of the token that ends a document; "" means the folder's `eos_token`.
    """

    def __init__(self, saved: TokenizerFacts, end: str = ""):
        self.tokenizer, self.dtype = load(saved), token_dtype(saved.size)
        self.before, self.after = enclosing_tokens(saved, self.tokenizer)
        self.end = end_token(saved, end)

    def encode(self, pieces: Sequence[DocumentPiece]) -> list[np.ndarray]:
        """Returns the tokens of each piece with their flag bits."""
        texts = [piece.text for piece in pieces]
        if any(piece.answers is not None for piece in pieces):
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        else:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._with_special_tokens(piece, encoding) for piece, encoding in zip(pieces, encodings, strict=True)]

    def _with_special_tokens(self, piece: DocumentPiece, found: Any) -> np.ndarray:
        ids = found.ids
        if piece.answers is not None:
            learned = _answer_mask(np.array(found.offsets, np.int64).reshape(-1, 2), piece.answers)
            if not piece.rendered:  # a text: the special tokens after an answer belong to it
                after = [*self.after, *[self.end] * (self.after[-1:] != [self.end])]
                ids = [*self.before, *ids, *after]
                learned = np.concatenate([np.zeros(len(self.before), bool), learned, np.ones(len(after), bool)])
            return set_flags(np.array(ids, np.uint32), self.dtype, first=piece.first, learned=learned)
        if not piece.rendered:
            ids = [*(self.before if piece.first else ()), *ids, *(self.after if piece.last else ())]
            if piece.last and self.end is not None and ids[-1:] != [self.end]:
                ids.append(self.end)
        return set_flags(np.array(ids, np.uint32), self.dtype, first=piece.first)

    def seam(self, left: str, right: str) -> int | None:
        """Checks that a text cut in two parts gets the tokens of the whole text.

        Returns the number of characters to drop at the beginning of the right part, or None if the tokens differ. One
        space is dropped for a tokenizer that adds a space before every text.
        """
        expected = self._ids(left + right)
        for drop in (0, 1):
            if self._ids(left) + self._ids(right[drop:]) == expected:
                return drop
        return None

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def end_token(saved: TokenizerFacts, end: str) -> int:
    """Returns the id of the token that ends a document.

    Raises:
      JaxparError: If `end` is no token of the tokenizer, or is "" and the folder names no `eos_token`.
    """
    if end:
        if end not in saved.ids:
            fix = suggest(end, saved.added, otherwise=f"one of: {_end_candidates(saved)}, or leave it out")
            raise refuse(f"data.end = {end!r}", rule=f"data.end is a token of {saved.file}", fix=fix)
        return saved.ids[end]
    eos = saved.special_id("eos_token")
    if eos is None:
        choices = _end_candidates(saved)
        raise refuse(
            f"{saved.file.parent} names no eos_token",
            rule="a token ends each document: eos_token in the folder of tokenizer.json, or data.end",
            fix=f"data.end = one of: {choices}" if choices else "a tokenizer with special tokens",
        )
    return eos


def _end_candidates(saved: TokenizerFacts) -> str:
    """The first 8 special and added tokens, as candidates for the end of a document."""
    return ", ".join(list(dict.fromkeys([*saved.special.values(), *saved.added]))[:8])


def load(saved: TokenizerFacts) -> Any:
    """Loads the tokenizer in the package `tokenizers`, without padding and truncation.

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
    with user_code_errors(str(saved.file), rule="a tokenizer is as `tokenizers` saved it", fix="save it anew"):
        tokenizer = Tokenizer.from_file(str(saved.file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if not saved.config:
        return tokenizer
    # as transformers 4.57 completes a tokenizer.json by its config (tokenization_utils_fast.py, line 174 on)
    for number, token in sorted(
        dict(saved.config.get("added_tokens_decoder") or {}).items(), key=lambda pair: int(pair[0])
    ):
        if tokenizer.token_to_id(token["content"]) is None and int(number) == tokenizer.get_vocab_size():
            tokenizer.add_tokens([AddedToken(**{key: value for key, value in token.items() if key != "__type"})])
    state = json.loads(saved.file.read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    prefix_space = saved.config.get("add_prefix_space", False)
    if state.get("add_prefix_space", prefix_space) != prefix_space:
        settings = {key: value for key, value in state.items() if key != "type"} | {"add_prefix_space": prefix_space}
        tokenizer.pre_tokenizer = getattr(pre_tokenizers, state["type"])(**settings)
    return tokenizer


def enclosing_tokens(saved: TokenizerFacts, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Finds the ids of special tokens before and after a text: in the config if it decides, else by encoding one."""
    if saved.adds_bos_eos is not None:
        return tuple(
            [token] if is_added and (token := saved.special_id(key)) is not None else []
            for key, is_added in zip(("bos_token", "eos_token"), saved.adds_bos_eos, strict=True)
        )  # pyright: ignore[reportReturnType]
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    enclosed = tokenizer.encode("a", add_special_tokens=True).ids
    for begin in range(len(enclosed) - len(bare) + 1):
        if enclosed[begin : begin + len(bare)] == bare:
            return enclosed[:begin], enclosed[begin + len(bare) :]
    raise refuse(
        f"{saved.file} makes {enclosed} of 'a' with special tokens, {bare} without",
        rule="special tokens go before and after a text",
        fix="a tokenizer with a post_processor of that kind",
    )


def _answer_mask(offsets: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each token holds a character of an answer. Shape [n], bool."""
    learned = np.zeros(len(offsets), bool)
    for begin, end in answers:
        learned |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    return learned


# Encodes documents in batches of pieces, in order, on a thread parallel to reading and writing.

AT_ONCE = 2**21  # characters per batch of pieces; their tokens take ten times as much memory
MOST = 4096  # pieces per batch


def open_corpus(spec: Data, files: Iterable[Path]) -> Corpus:
    """Opens the documents in these files, by the settings of the `[data]` table."""
    if not spec.has_rows:
        return Corpus(tuple(files))
    if spec.preferences:
        from jaxpar.data.documents.preference_rows import PreferenceCorpus  # other data does not load it

        load_chat = None if spec.tokenizer in OURS else cache(lambda: load_template(read_tokenizer(spec.tokenizer)))
        return PreferenceCorpus(tuple(files), load_chat=load_chat)
    template = load_template(read_tokenizer(spec.tokenizer)) if spec.messages else None
    return RowCorpus(tuple(files), column=spec.messages or spec.column, chat=template, answers=spec.learn == "answers")


def token_settings(spec: Data) -> str:
    """Returns the settings that determine the tokens of files, as text; "" for plain text in bytes or trained BPE."""
    if not spec.is_marked:
        return ""
    settings = [
        spec.source,
        spec.tokenizer if spec.tokenizer in OURS else read_tokenizer(spec.tokenizer).digest,
    ]
    settings += [str(spec.tokens), spec.end, spec.column, spec.messages, spec.learn]
    return "\n".join([*settings, *["preferences"] * spec.preferences])


def encode_documents(
    corpus: Corpus, encoder: Encoder, read: Callable[[int], None], place: Place = START
) -> Iterator[tuple[np.ndarray, Place]]:
    """Yields the tokens of documents from a place on, with the place after them.

    Args:
      corpus: The documents.
      encoder: Runs on a thread, while the next pieces are read and the last tokens are written.
      read: Called with the number of bytes of the files that were tokenized.
      place: Where to begin.
    """
    groups = _groups(corpus.pieces(place, encoder.seam))
    with ThreadPoolExecutor(1) as worker:
        pending = None
        for group in groups:
            ready, pending = pending, (group, worker.submit(_encode, encoder, group))
            if ready is not None:
                yield ready[1].result(), ready[0][-1].next
                read(sum(piece.size for piece in ready[0]))
        if pending is not None:
            yield pending[1].result(), pending[0][-1].next
            read(sum(piece.size for piece in pending[0]))


def _encode(encoder: Encoder, group: list[DocumentPiece]) -> np.ndarray:
    return np.concatenate(encoder.encode(group))


def _groups(pieces: Iterator[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= AT_ONCE or len(group) == MOST:
            yield group
            group, size = [], 0
    if group:
        yield group


def document_encoder(corpus: Corpus, encoder: Encoder, read: Callable[[int], None]):
    """Returns the function that maps a place to the tokens from there on, for `packing.write_tokens`."""
    return partial(encode_documents, corpus, encoder, read)
