"""Normalizes the conversations of rows for a chat template, and finds the messages that are learned.

In a columnar file every message has every key of every other one, as null, and JSON may write null for an absent key.
A template tests whether a key exists (`'tool_calls' in message`), so keys with null are removed, as in TRL.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import refuse

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


def conversation(value: Any, tools: Any, *, column: str, where: str) -> Conversation:
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


def preview(value: Any) -> str:
    """The beginning of a value, for an error; "null" for None."""
    return f"{value!r:.60}" if value is not None else "null"


def _without_null(value: Any) -> Any:
    """Removes keys with null, recursively."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list | tuple) else value


def _with_text(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the message with its content as text: a list of text parts is concatenated."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if message.get("tool_calls"):
            return message
        fault = "has no content, or null"
    elif isinstance(content, list) and all(_text_of(part) is not None for part in content):
        return {**message, "content": "".join(str(_text_of(part)) for part in content)}
    else:
        bad_parts = [part for part in content if _text_of(part) is None] if isinstance(content, list) else [content]
        fault = f"has the content {preview(bad_parts[0])}"
    raise refuse(
        f"{where} ({message['role']}) {fault}",
        rule="a content is text, or a list of parts {type: text, text: ...}; only tool_calls stand without one",
        fix="text in its place, or the file without this row",
    )


def _text_of(part: Any) -> str | None:
    """Text of a part of a content; None for other kinds, such as an image."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    """Whether a message is an assistant's and no weight of 0 excludes it."""
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


def _tools(tools: Any, where: str) -> Sequence[Any] | None:
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
