"""A conversation with the model of a run: a line in, an answer out, until the lines end.

With the chat template of the tokenizer's folder, lines and answers are messages; without one, they are a text that goes
on. The newest part of the conversation is what the model sees, as far as its window reaches.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from jaxpar.data.tokenizers.chat import chat as read_template
from jaxpar.data.tokenizers.saved import saved
from jaxpar.errors import users_code
from jaxpar.job.sample import Asked, Speaker, speaker

Tokens = Callable[[list[dict[str, str]]], list[int]]


def chat(
    folder: str | Path,
    lines: Iterable[str],
    say: Callable[[str], None],
    asked: Asked,
    *,
    allow_import: bool = False,
) -> list[dict[str, str]]:
    """Answers each line, and returns the conversation.

    Args:
      folder: The run folder.
      lines: What the user says; empty lines are passed over.
      say: Takes each answer.
      asked: How the model is asked.
      allow_import: Whether the run may name Python objects from anywhere.

    Raises:
      JaxparError: If the folder holds no trained model of text, or its chat template raises.
    """
    model = speaker(folder, asked, allow_import=allow_import)
    tokens, said = _tokens(model), []
    for turn, line in enumerate(each.strip() for each in lines):
        if not line:
            continue
        said.append({"role": "user", "content": line})
        # another seed in each turn: the same would draw alike where two turns are alike
        sampling = replace(asked.sampling, seed=asked.sampling.seed + turn)
        ((answer, _),) = model.continued([tokens(said)], replace(asked, sampling=sampling))
        said.append({"role": "assistant", "content": answer.strip()})
        say(answer.strip())
    return said


def _tokens(model: Speaker) -> Tokens:
    """Returns what makes tokens of a conversation that an answer is to follow."""
    kept = saved(model.tokenizer) if model.tokenizer else None
    bpe = model.text.bpe
    if kept is None or bpe is None or not kept.template:
        return lambda said: model.text.encode("".join(f"{each['content']}\n" for each in said))
    template = read_template(kept)

    def rendered(said: list[dict[str, str]]) -> list[int]:
        with users_code("the chat template", rule="a template renders every conversation", fix="another tokenizer"):
            text, _ = template.render(said, True)
        return bpe.encode(text, add_special_tokens=False).ids  # the template says where a text begins

    return rendered
