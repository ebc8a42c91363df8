"""Normalizes conversations, renders them by a model's chat template, and locates the answers that the loss counts.

In a columnar file all messages have the same keys, and absent values are null; JSON files may have such nulls, too.
A template tests whether a key exists (`'tool_calls' in message`), so keys with null are removed, as in TRL.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jaxpar.data.tokenizers.tokenizer_facts import TokenizerFacts
from jaxpar.errors import refuse, user_code_errors

WEIGHTS = ("weight", "train", "trainable")  # the key of OpenAI's and Mistral's files, of axolotl's, and of verl's


@dataclass(frozen=True)
class Conversation:
    """A row of messages.

    Attributes:
      messages: The messages for the template: role, content as text (if any), and all other keys.
      tools: The tools that the template describes, or None.
      learned: For each message, whether the loss may count it.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    learned: tuple[bool, ...]


def conversation(value: object, tools: object, *, column: str, where: str) -> Conversation:
    """Parses the conversation of a row.

    Args:
      value: The value of the column of messages.
      tools: The value of the column `tools`, or None: a list, or a list as JSON text.
      column: The name of the column of messages.
      where: Description of the row, for errors.

    Raises:
      JaxparError: If it is no list of messages; if a content is no text; if a weight is neither 0 nor 1.
    """
    messages = _without_null(value)
    is_list = isinstance(messages, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    )
    if not is_list or not messages:
        raise refuse(
            f"{where}: {column} is {preview(value)}",
            rule="messages are a list of at least one {role, content}",
            fix=f"data.column = {column!r}" if isinstance(value, str) else 'data.messages = "messages"',
        )
    learned = tuple(_is_learned(turn, f"{where}, message {i}") for i, turn in enumerate(messages))
    texts = [_with_text(turn, f"{where}, message {i}") for i, turn in enumerate(messages)]
    return Conversation(texts, _tools(tools, where), learned)


def preview(value: object) -> str:
    """The beginning of a value, for an error; "null" for None."""
    return f"{value!r:.60}" if value is not None else "null"


def _without_null(value: object) -> Any:
    """Removes keys with null, recursively."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list | tuple) else value


def _with_text(message: Mapping[str, object], where: str) -> Mapping[str, Any]:
    """Returns the message with its content as text: a list of text parts is concatenated."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if message.get("tool_calls"):
            return message
        fault = "has no content, or null"
    elif isinstance(content, list) and all(_part_text(part) is not None for part in content):
        return {**message, "content": "".join(str(_part_text(part)) for part in content)}
    else:
        bad_parts = [part for part in content if _part_text(part) is None] if isinstance(content, list) else [content]
        fault = f"has the content {preview(bad_parts[0])}"
    raise refuse(
        f"{where} ({message['role']}) {fault}",
        rule="a content is text, or a list of parts {type: text, text: ...}; only tool_calls stand without one",
        fix="text in its place, or the file without this row",
    )


def _part_text(part: object) -> str | None:
    """Text of a part of a content; None for other kinds, such as an image."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _is_learned(message: Mapping[str, object], where: str) -> bool:
    """Whether the loss counts a message: the assistant wrote it, and it has no weight of 0."""
    answer = message["role"] == "assistant"
    weights = {key: message[key] for key in WEIGHTS if key in message}
    for key, weight in weights.items():
        if weight not in (0, 1) or (weight and not answer):
            raise refuse(
                f"{where} ({message['role']}): {key} = {weight!r:.40}",
                rule="an assistant's message has the weight 1, learned, or 0, left out; others are never learned",
                fix=f'{key}: 0 or 1 for an assistant, no {key} for others; or data.learn = "all"' * (not answer)
                or f"{key}: 0 or 1",
            )
    return answer and all(weights.values())


def _tools(tools: object, where: str) -> Sequence[Any] | None:
    try:
        tools = _without_null(json.loads(tools) if isinstance(tools, str) and tools else tools)
    except ValueError:
        tools = 0
    if not tools and tools != 0:
        return None
    if not isinstance(tools, list):
        raise refuse(
            f"{where}: tools is {preview(tools) if tools else 'no JSON'}",
            rule="the column tools, which the chat template describes, is a list, or a text of JSON that is one",
            fix="another name for this column",
        )
    return tools


# Renders messages by a model's chat template, and locates the answers that the loss counts.
#
#     {"role": "user", "content": "2 + 2?"}      ─► <|user|>2 + 2?<|end|>
#     {"role": "assistant", "content": "4"}      ─► <|assistant|>4<|end|>          learned: 4<|end|>
#
# A template is untrusted code: it runs in jinja2's sandbox, with the names that transformers 4.57 gives it
# (utils/chat_template_utils.py). Answers are the text of its `{% generation %}` blocks; without such blocks, the text
# that an assistant's message adds after the earlier messages and the generation prompt.

Answers = tuple[tuple[int, int], ...]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
      render: Maps (messages, add_generation_prompt, tools) to text and the spans of its `{% generation %}` blocks.
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
            return text, self._drop_unlearned_blocks(conversation, spans, where) if self.has_generation else tuple(
                self._answers(conversation, text, where)
            )

    def _drop_unlearned_blocks(self, conversation: Conversation, marked: Answers, where: str) -> Answers:
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

    def render(messages: Sequence[object], prompt: bool, tools: Sequence[Any] | None = None) -> tuple[str, Answers]:
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
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
):
    """JSON as transformers writes it; unlike jinja2's own filter it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
