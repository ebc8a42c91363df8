"""Messages to text by the template of a model's folder, and which of it are answers.

    {"role": "user", "content": "2 + 2?"}      ─► <|user|>2 + 2?<|end|>
    {"role": "assistant", "content": "4"}      ─► <|assistant|>4<|end|>          learned: 4<|end|>

A template is code of strangers: it runs in jinja2's sandbox, with the names that transformers 4.57 gives it
(utils/chat_template_utils.py). Answers are what its `{% generation %}` blocks hold; without such blocks, what an
assistant's message adds to the conversation before it and the prompt of an answer.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jaxpar.data.documents.messages import Conversation
from jaxpar.data.tokenizers.saved import Saved
from jaxpar.errors import refuse, users_code

Answers = tuple[tuple[int, int], ...]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Chat:
    """The template of a model's folder.

    Attributes:
      render: Messages and whether the prompt of an answer is added, to text and what its marks hold.
      marked: Whether the template marks what is learned.
    """

    render: Callable[..., tuple[str, Answers]]
    marked: bool

    def text(self, given: Conversation, where: str) -> tuple[str, Answers]:
        """Returns a conversation as text, and where the answers are that are learned.

        Args:
          given: The conversation.
          where: Words for the row.

        Raises:
          JaxparError: If the template raises, or does not show where an answer begins.
        """
        with users_code(f"{where}: the chat template", rule="a template renders every conversation", fix="another row"):
            whole, marked = self.render(given.messages, False, given.tools)
            return whole, self._weighed(given, marked, where) if self.marked else tuple(
                self._answers(given, whole, where)
            )

    def _weighed(self, given: Conversation, marked: Answers, where: str) -> Answers:
        """Returns the blocks of `{% generation %}` without those of answers that are not learned."""
        learned = [on for on, each in zip(given.learned, given.messages, strict=True) if each["role"] == "assistant"]
        if all(learned):
            return marked
        if len(marked) != len(learned):
            raise refuse(
                f"{where}: {len(marked)} blocks of generation for {len(learned)} answers, some of weight 0",
                rule="where answers have weights, the template marks each of them by a block of its own",
                fix="{% generation %} and {% endgeneration %} around each answer in the template",
            )
        return tuple(block for block, on in zip(marked, learned, strict=True) if on)

    def _answers(self, given: Conversation, whole: str, where: str):
        for index, learned in enumerate(given.learned):
            if not learned:
                continue
            before = self.render(given.messages[:index], True, given.tools)[0] if index else ""
            through = self.render(given.messages[: index + 1], False, given.tools)[0]
            if not through.startswith(before) or not whole.startswith(through):
                raise refuse(
                    f"{where}: message {index} changes how the template renders those before it",
                    rule="a template without {% generation %} shows an answer by what it adds to the conversation",
                    fix="{% generation %} and {% endgeneration %} around the answers in the template; "
                    'or data.learn = "all"',
                )
            yield len(before), len(through)


def chat(saved: Saved) -> Chat:
    """Returns the template of a tokenizer's folder, ready to render.

    Raises:
      JaxparError: If jinja2 is missing, there is no template, or it is no jinja.
    """
    if not saved.template:
        raise refuse(
            f"data.messages, and {saved.file.parent} has no chat template",
            rule="messages become text by chat_template.jinja, or chat_template of tokenizer_config.json",
            fix="the folder of a model for chats; or data.column = a column of text",
        )
    try:
        from jinja2 import ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise refuse(
            "data.messages without the package jinja2",
            rule="a chat template is rendered in jinja2's sandbox",
            fix="pip install 'jaxpar[text]'",
        ) from error
    blocks: list[str] = []
    answers: list[tuple[int, int]] = []
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(blocks, answers), ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _raise, "strftime_now": lambda format: datetime.now().strftime(format)}
    with users_code(
        f"the chat template of {saved.file.parent}", rule="a chat template is jinja", fix="save the tokenizer anew"
    ):
        template = made.from_string(saved.template)
    special = saved.special
    more = saved.config.get("additional_special_tokens") or []
    if more:
        special |= {"additional_special_tokens": [each if isinstance(each, str) else each["content"] for each in more]}

    def render(messages: Sequence[Any], prompt: bool, tools: Sequence[Any] | None = None) -> tuple[str, Answers]:
        blocks.clear()
        answers.clear()
        names = dict(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt) | special
        blocks.extend(template.generate(names))  # one by one: the extension sees what is rendered before it
        return "".join(blocks), tuple(answers)

    return Chat(render, bool(_MARKED.search(saved.template)))


def _generation(blocks: list[str], answers: list[tuple[int, int]]) -> type:
    """Returns the extension of jinja that notes where in the blocks the text of `{% generation %}` lies."""
    from jinja2 import ext, nodes

    class Generation(ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

        def _note(self, caller: Callable[[], str]) -> str:
            text, begin = caller(), sum(map(len, blocks))
            answers.append((begin, begin + len(text)))
            return text

    return Generation


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    """Returns JSON as transformers writes it, whose filter escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
