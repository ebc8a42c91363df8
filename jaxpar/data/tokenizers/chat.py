"""Renders messages by a model's chat template, and locates the answers that the loss counts.

    {"role": "user", "content": "2 + 2?"}      ─► <|user|>2 + 2?<|end|>
    {"role": "assistant", "content": "4"}      ─► <|assistant|>4<|end|>          learned: 4<|end|>

A template is untrusted code: it runs in jinja2's sandbox, with the names that transformers 4.57 gives it
(utils/chat_template_utils.py). Answers are the text of its `{% generation %}` blocks; without such blocks, the text
that an assistant's message adds after the earlier messages and the generation prompt.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jaxpar.data.documents.messages import Conversation
from jaxpar.data.tokenizers.tokenizer_facts import TokenizerFacts
from jaxpar.errors import refuse, user_code_errors

Answers = tuple[tuple[int, int], ...]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
      render: (messages, add_generation_prompt, tools) to text and the spans of its `{% generation %}` blocks.
      has_generation: Whether the template has `{% generation %}` blocks.
    """

    render: Callable[..., tuple[str, Answers]]
    has_generation: bool

    def render_conversation(self, conversation: Conversation, where: str) -> tuple[str, Answers]:
        """Renders a conversation; returns its text and the (begin, end) characters of the answers to learn.

        Args:
          conversation: The conversation.
          where: Description of the row, for errors.

        Raises:
          JaxparError: If the template raises, or does not show where an answer begins.
        """
        with user_code_errors(
            f"{where}: the chat template", rule="a template renders every conversation", fix="another row"
        ):
            text, spans = self.render(conversation.messages, False, conversation.tools)
            return text, self._learned_blocks(conversation, spans, where) if self.has_generation else tuple(
                self._answers(conversation, text, where)
            )

    def _learned_blocks(self, conversation: Conversation, marked: Answers, where: str) -> Answers:
        """Drops the `{% generation %}` blocks of answers of weight 0."""
        learned = [
            on
            for on, item in zip(conversation.learned, conversation.messages, strict=True)
            if item["role"] == "assistant"
        ]
        if all(learned):
            return marked
        if len(marked) != len(learned):
            raise refuse(
                f"{where}: {len(marked)} blocks of generation for {len(learned)} answers, some of weight 0",
                rule="where answers have weights, the template marks each of them by a block of its own",
                fix="{% generation %} and {% endgeneration %} around each answer in the template",
            )
        return tuple(block for block, on in zip(marked, learned, strict=True) if on)

    def _answers(self, conversation: Conversation, whole: str, where: str):
        for index, learned in enumerate(conversation.learned):
            if not learned:
                continue
            prefix = self.render(conversation.messages[:index], True, conversation.tools)[0] if index else ""
            rendered = self.render(conversation.messages[: index + 1], False, conversation.tools)[0]
            if not rendered.startswith(prefix) or not whole.startswith(rendered):
                raise refuse(
                    f"{where}: message {index} changes how the template renders those before it",
                    rule="a template without {% generation %} shows an answer by what it adds to the conversation",
                    fix="{% generation %} and {% endgeneration %} around the answers in the template; "
                    'or data.learn = "all"',
                )
            yield len(prefix), len(rendered)


def load_template(saved: TokenizerFacts) -> ChatTemplate:
    """Compiles the chat template of a tokenizer's folder.

    Raises:
      JaxparError: If jinja2 is missing, there is no template, or it is not valid jinja.
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
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(blocks, answers), ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda format: datetime.now().strftime(format)}
    with user_code_errors(
        f"the chat template of {saved.file.parent}", rule="a chat template is jinja", fix="save the tokenizer anew"
    ):
        template = environment.from_string(saved.template)
    special = saved.special
    extra = saved.config.get("additional_special_tokens") or []
    if extra:
        special |= {"additional_special_tokens": [item if isinstance(item, str) else item["content"] for item in extra]}

    def render(messages: Sequence[Any], prompt: bool, tools: Sequence[Any] | None = None) -> tuple[str, Answers]:
        blocks.clear()
        answers.clear()
        names = dict(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt) | special
        blocks.extend(template.generate(names))  # one by one: the extension sees what is rendered before it
        return "".join(blocks), tuple(answers)

    return ChatTemplate(render, bool(_MARKED.search(saved.template)))


def _generation(blocks: list[str], answers: list[tuple[int, int]]) -> type:
    """Jinja extension that records the span of each `{% generation %}` block in the rendered text."""
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
    """JSON as transformers writes it; unlike jinja2's own filter it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
