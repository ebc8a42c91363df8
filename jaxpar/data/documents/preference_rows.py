"""Reads rows of preferences: a prompt, a chosen and a rejected answer, as two documents each.

    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}          text
    {"prompt": [{"role": ...}], "chosen": [...], "rejected": [...]}  messages, which a chat template renders
    {"chosen": [...], "rejected": [...]}                            messages whose common beginning is the prompt

Each answer follows the prompt in a document of its own, of which only the answer is learned.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.data.documents.plain_text import START, DocumentPiece, Place
from jaxpar.data.documents.row_files import TOOLS, RowCorpus, read_rows
from jaxpar.data.tokenizers.chat_template import ChatTemplate, conversation, preview
from jaxpar.errors import refuse

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
RULE = "a row of preferences has a prompt, a chosen and a rejected answer: three texts, or three lists of messages"
FIX = '{"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}'
Answer = tuple[str, tuple[tuple[int, int], ...]]  # the text with its prompt, and the characters of the answer


@dataclass(frozen=True)
class PreferenceCorpus(RowCorpus):
    """Pairs of documents, of which each row of the files is one: chosen, then rejected.

    Attributes:
      load_chat: Loads the chat template; called only if there are messages.
    """

    load_chat: Callable[[], ChatTemplate] | None = None

    def pieces(
        self, place: Place = START, seam: Callable[[str, str], int | None] | None = None
    ) -> Iterator[DocumentPiece]:
        """Yields the documents from a place on; `seam` is unused, since no row is cut.

        Raises:
          JaxparError: If a row is broken, is no preference, or its template raises.
        """
        for number in range(place.file, len(self.files)):
            begin = place if number == place.file else Place(number)
            at, skipped = begin._replace(part=0), begin.part
            for row, size, end, where, unknown in read_rows(
                self.files[number], CHOSEN, at, others=(PROMPT, REJECTED, TOOLS)
            ):
                self.replaced.count(unknown, end, where)
                chosen, rejected = self._documents(row, where)
                rendered = not isinstance(row[CHOSEN], str)
                pair = (
                    DocumentPiece(chosen[0], size, at._replace(part=1), answers=chosen[1], rendered=rendered),
                    DocumentPiece(rejected[0], 0, end, answers=rejected[1], rendered=rendered),
                )
                yield from pair[skipped:]
                at, skipped = end, 0

    def _documents(self, row: Mapping[str, Any], where: str) -> tuple[Answer, Answer]:
        prompt, chosen, rejected = (row.get(key) for key in (PROMPT, CHOSEN, REJECTED))
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            first, second = (
                (prompt + answer, ((len(prompt), len(prompt) + len(answer)),)) for answer in (chosen, rejected)
            )
            return first, second
        if not isinstance(chosen, list) or not isinstance(rejected, list) or isinstance(prompt, str):
            shown = ", ".join(f"{key} = {preview(row.get(key))}" for key in (PROMPT, CHOSEN, REJECTED))
            raise refuse(f"{where}: {shown}", rule=RULE, fix=FIX)
        if prompt is None:
            shared = _common_beginning(chosen, rejected)
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        tools = row.get(TOOLS)
        return self._render_answer(prompt, chosen, tools, CHOSEN, where), self._render_answer(
            prompt, rejected, tools, REJECTED, where
        )

    def _render_answer(self, prompt: list, answer: list, tools: object, column: str, where: str) -> Answer:
        if self.load_chat is None:
            raise refuse(
                f"{where}: {column} is {preview(answer)}, with data.tokenizer = bytes or bpe",
                rule="messages are rendered by the chat template of a tokenizer's folder",
                fix="data.tokenizer = the folder of the model; or texts in place of messages",
            )
        if not answer:
            raise refuse(f"{where}: {column} has no message after the prompt", rule=RULE, fix="leave the row out")
        messages = conversation([*prompt, *answer], tools, column=column, where=where)
        learned = tuple(on and index >= len(prompt) for index, on in enumerate(messages.learned))
        if not any(learned):
            raise refuse(
                f"{where}: {column} has no message of an assistant after the prompt", rule=RULE, fix="leave the row out"
            )
        return self.load_chat().render_conversation(replace(messages, learned=learned), where)


def _common_beginning(chosen: list, rejected: list) -> int:
    """Returns the number of equal messages at the beginning of two conversations."""
    count = 0
    for first, second in zip(chosen, rejected, strict=False):
        if first != second:
            break
        count += 1
    return count
