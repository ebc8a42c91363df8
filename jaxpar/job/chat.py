"""Chats with the model of a run: one answer per input line.

If the tokenizer has a chat template, lines and answers are messages; otherwise they are one continued text. The model
gets the newest part of the conversation that fits its window.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from jaxpar.data.tokenizers.chat_template import load_template as read_template
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import user_code_errors
from jaxpar.job.sample import SamplingRequest, TextModel, load_text_model

Tokens = Callable[[list[dict[str, str]]], list[int]]


def chat(
    folder: str | Path,
    lines: Iterable[str],
    say: Callable[[str], None],
    request: SamplingRequest,
    *,
    allow_import: bool = False,
) -> list[dict[str, str]]:
    """Answers each line and returns the conversation as messages.

    Args:
      folder: The run folder.
      lines: The user's lines; empty ones are skipped.
      say: Called with each answer.
      request: Sampling settings.
      allow_import: Whether the run's job may import Python objects from any module.

    Raises:
      JaxparError: If the folder has no trained text model, or its chat template raises.
    """
    model = load_text_model(folder, request, allow_import=allow_import)
    tokens, messages = _tokens(model), []
    for turn, line in enumerate(text.strip() for text in lines):
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        # a new seed per turn: otherwise equal turns would draw equal answers
        sampling = replace(request.sampling, seed=request.sampling.seed + turn)
        ((answer, _),) = model.continue_rows([tokens(messages)], replace(request, sampling=sampling))
        messages.append({"role": "assistant", "content": answer.strip()})
        say(answer.strip())
    return messages


def _tokens(model: TextModel) -> Tokens:
    """Returns the function that maps a conversation to the prompt's tokens for the next answer."""
    tokenizer = read_tokenizer(model.tokenizer) if model.tokenizer else None
    bpe = model.text.bpe
    if tokenizer is None or bpe is None or not tokenizer.template:
        return lambda messages: model.text.encode("".join(f"{message['content']}\n" for message in messages))
    template = read_template(tokenizer)

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        with user_code_errors(
            "the chat template", rule="a template renders every conversation", fix="another tokenizer"
        ):
            text, _ = template.render(messages, True)
        return bpe.encode(text, add_special_tokens=False).ids  # the template already contains bos

    return rendered
