"""Conversations as rows hold them: what a template is given, and which answers are learned.

A columnar file gives every message every key of every other one, as null, and JSON says null for a key that is left
out. A template asks whether there is a key (`'tool_calls' in message`), so a key of null is none, as in TRL.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import refuse

WEIGHTS = ("weight", "train", "trainable")  # of OpenAI's and Mistral's files, of axolotl's, and of verl's


@dataclass(frozen=True)
class Conversation:
    """A row of messages.

    Attributes:
      messages: For the template: role, content as text where there is one, and whatever else a message has.
      tools: The tools that the template describes, or None.
      learned: For each message whether it may be learned.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    learned: tuple[bool, ...]


def conversation(value: Any, tools: Any, *, column: str, where: str) -> Conversation:
    """Returns the conversation of a row.

    Args:
      value: The column of messages.
      tools: The column `tools` of the row, or None: a list, or a text of JSON that is one.
      column: The name of the column of messages.
      where: Words for the row.

    Raises:
      JaxparError: If it is no list of messages; if a content is no text; if a weight is neither 0 nor 1.
    """
    messages = _without_null(value)
    good = isinstance(messages, list) and all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages
    )
    if not good or not messages:
        raise refuse(
            f"{where}: {column} is {shown(value)}",
            rule="messages are a list of at least one {role, content}",
            fix=f"data.column = {column!r}" if isinstance(value, str) else 'data.messages = "messages"',
        )
    learned = tuple(_is_learned(message, f"{where}, message {i}") for i, message in enumerate(messages))
    texts = [_with_text(message, f"{where}, message {i}") for i, message in enumerate(messages)]
    return Conversation(texts, _tools(tools, where), learned)


def shown(value: Any) -> str:
    """Returns the beginning of a value for a message; "null" for None."""
    return f"{value!r:.60}" if value is not None else "null"


def _without_null(value: Any) -> Any:
    """Returns a value without the keys of null, also of what is in it."""
    if isinstance(value, Mapping):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list | tuple) else value


def _with_text(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns a message whose content is text: of parts of text all of them, one after the other."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if message.get("tool_calls"):
            return message
        got = "has no content, or null"
    elif isinstance(content, list) and all(_text_of(part) is not None for part in content):
        return {**message, "content": "".join(str(_text_of(part)) for part in content)}
    else:
        kinds = [part for part in content if _text_of(part) is None] if isinstance(content, list) else [content]
        got = f"has the content {shown(kinds[0])}"
    raise refuse(
        f"{where} ({message['role']}) {got}",
        rule="a content is text, or a list of parts {type: text, text: ...}; only tool_calls stand without one",
        fix="text in its place, or the file without this row",
    )


def _text_of(part: Any) -> str | None:
    """Returns the text of a part of a content; None where it is none, such as an image."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    """Returns whether a message is an answer that its file does not leave out."""
    answer = message["role"] == "assistant"
    given = {key: message[key] for key in WEIGHTS if key in message}
    for key, weight in given.items():
        if weight not in (0, 1) or (weight and not answer):
            raise refuse(
                f"{where} ({message['role']}): {key} = {weight!r:.40}",
                rule="an assistant's message has the weight 1, learned, or 0, left out; others are never learned",
                fix=f'{key}: 0 or 1 for an assistant, no {key} for others; or data.learn = "all"' * (not answer)
                or f"{key}: 0 or 1",
            )
    return answer and all(given.values())


def _tools(tools: Any, where: str) -> Sequence[Any] | None:
    """Returns the tools of a row for the template."""
    try:
        tools = _without_null(json.loads(tools) if isinstance(tools, str) and tools else tools)
    except ValueError:
        tools = 0
    if not tools and tools != 0:
        return None
    if not isinstance(tools, list):
        raise refuse(
            f"{where}: tools is {shown(tools) if tools else 'no JSON'}",
            rule="the column tools, which the chat template describes, is a list, or a text of JSON that is one",
            fix="another name for this column",
        )
    return tools
