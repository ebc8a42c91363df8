"""A trained run is asked for text: prompts in, texts out, on one device or on any layout of data, fsdp and tensor."""

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpar.buckets import opened
from jaxpar.checkpoint import Store
from jaxpar.data.spec import OURS
from jaxpar.data.tokens import Text
from jaxpar.errors import Keywords, refuse
from jaxpar.files import write_text
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job
from jaxpar.job.file.trained_job import job_of
from jaxpar.job.parts.batches import with_own_tokenizer
from jaxpar.job.parts.end_tokens import end_tokens
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.job.pretrained import KEPT
from jaxpar.mesh.devices import is_simulated, simulate, visible
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import merged, without_adapters
from jaxpar.sharding.names import Tree
from jaxpar.step import state
from jaxpar.step.sampling.draws import Sampling
from jaxpar.step.sampling.generator import Generator


@dataclass(frozen=True, kw_only=True)
class Asked(Keywords):
    """What is asked of a run.

    Attributes:
      tokens: How many are added to each prompt, at most.
      sampling: How they are drawn.
      stop: A text ends before any of these: texts, or special tokens such as <|eot_id|>.
      overrides: `parallel.tensor=2` and its like, and `mesh.simulate=8`: where the model runs; one device by default.
      cached: Whether keys and values are kept; None where the model can.
    """

    tokens: int = 200
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    cached: bool | None = None

    def __post_init__(self):
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise refuse(f"tokens {self.tokens!r}", rule="tokens is at least 1", fix="--tokens 200")
        if wrong := [each for each in self.overrides if not each.startswith(("parallel.", "mesh."))]:
            raise refuse(
                f"{wrong[0]!r:.80} of a trained run",
                rule="what may be said of a run that is sampled is where: parallel and mesh",
                fix="parallel.tensor=2",
            )
        if not all(self.stop):
            raise refuse("an empty text to stop at", rule="a text ends before what it stops at", fix='--stop "\\n\\n"')


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A continued prompt.

    Attributes:
      prompt: As it was given.
      text: What was added.
      tokens: How many were drawn.
    """

    prompt: str
    text: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Continued prompts.

    Attributes:
      answers: In the order of the prompts.
      rate: Tokens per second of all rows together, the start and compiling included; 0 on simulated devices, whose
        speed says nothing.
    """

    answers: tuple[Answer, ...]
    rate: float


def sample(folder: str | Path, prompts: Sequence[str], asked: Asked, *, allow_import: bool = False) -> Answers:
    """Returns what the model of a run adds to prompts.

    Args:
      folder: The run folder.
      prompts: The beginnings of texts.
      asked: How.
      allow_import: Whether the run may name Python objects from anywhere.

    Raises:
      JaxparError: If the folder holds no trained model of text, or a prompt is empty.
    """
    model = speaker(folder, asked, allow_import=allow_import)
    for prompt in prompts:
        check_prompt(prompt, f"the prompt {prompt!r:.60}")
    rows = [model.text.encode(prompt) for prompt in prompts]
    if not rows or not all(rows):
        raise refuse("an empty prompt", rule="a prompt has at least one token", fix='--prompt "\\n"')
    started = time.monotonic()
    new = model.continued(rows, asked)
    spent, drawn = time.monotonic() - started, sum(count for _, count in new)
    rate = 0.0 if is_simulated(list(model.generator.layout.on.devices.flat)) else drawn / spent
    made = [Answer(prompt=prompt, text=said, tokens=count) for prompt, (said, count) in zip(prompts, new, strict=True)]
    return Answers(answers=tuple(made), rate=rate)


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """The model of a run, ready to continue texts.

    Attributes:
      text: Its tokenizer.
      generator: The model on its layout.
      ends: Tokens that end a text.
      tokenizer: The folder of a tokenizer of Hugging Face's that the run has kept; "" where it is our own.
    """

    text: Text
    generator: Generator
    ends: tuple[int, ...]
    tokenizer: str

    def continued(self, rows: Sequence[list[int]], asked: Asked) -> list[tuple[str, int]]:
        """Returns for each row of tokens the text after it, up to where it stops, and how many tokens were drawn."""
        tokens = {each: self.text.special(each) for each in asked.stop}  # which texts do not show
        ends = (*self.ends, *(each for each in tokens.values() if each is not None))
        stop = tuple(each for each, token in tokens.items() if token is None)
        stops = partial(_stops, self.text, stop, ends)
        new = self.generator.run(rows, asked.sampling, most=asked.tokens, stops=lambda _, drawn: stops(drawn))
        return [(_said(self.text, row, each, stop, ends), len(each)) for row, each in zip(rows, new, strict=True)]


def speaker(folder: str | Path, asked: Asked, *, allow_import: bool = False) -> Speaker:
    """Returns the model of a run.

    Raises:
      JaxparError: If the folder holds no trained model of text.
    """
    folder = opened(folder)
    job = _of_text(folder, allow_import=allow_import)
    given = loads("", [*asked.overrides])
    if given.mesh.simulate:
        simulate(given.mesh.simulate)
    text = Text(folder / "data", job.data.tokenizer)
    layout, params, model_state = _restored(job, folder, given.parallel if asked.overrides else Parallel())
    made = Generator(
        layout, params, model_state, window=job.data.seq, known=text.size, cached=asked.cached
    )  # what is above is no token of the text
    own = "" if job.data.tokenizer in OURS else job.data.tokenizer
    return Speaker(text=text, generator=made, ends=end_tokens(job, folder, folder / KEPT), tokenizer=own)


def check_prompt(prompt: str, where: str) -> None:
    """Refuses half of a surrogate pair, which is no Unicode; bytes of a command line that are no utf-8 pass.

    Raises:
      JaxparError: If there is one.
    """
    if half := re.search("[\ud800-\udc7f\udd00-\udfff]", prompt):
        raise refuse(
            f"{where} has half of a surrogate pair, \\u{ord(half[0]):x}",
            rule="a prompt is Unicode",
            fix="without that character",
        )


def read_prompts(file: Path) -> list[str]:
    """Returns the prompts of a file: of .jsonl the `prompt` of each line, of any other each line that is not empty.

    Raises:
      JaxparError: If it cannot be read, or a line is no prompt: with its number.
    """
    rule, fix = "a file of prompts has one a line, or in .jsonl tables with `prompt`", '{"prompt": "Once upon"}'
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # str.splitlines cuts at U+2028 too, inside of a prompt
    except (OSError, ValueError) as error:
        raise refuse(f"{file}: {getattr(error, 'strerror', None) or 'no utf-8'}", rule=rule, fix=fix) from error
    if file.suffix != ".jsonl":
        found = [line for line in lines if line]
    else:
        found = [_prompt(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise refuse(f"{file} holds no prompt", rule=rule, fix=fix)
    return found


def write_answers(file: Path, answers: Answers) -> None:
    """Writes a line of JSON for each answer: prompt, text, tokens."""
    lines = [json.dumps(asdict(each), ensure_ascii=False) for each in answers.answers]
    write_text(file, "".join(f"{line}\n" for line in lines))


def _prompt(file: Path, number: int, line: str) -> str:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("prompt"), str) or not said["prompt"]:
        raise refuse(
            f"{file}, line {number}: {line:.60}",
            rule="a line of .jsonl is a table with a `prompt`, a text that is not empty",
            fix='{"prompt": "Once upon"}',
        )
    check_prompt(said["prompt"], f"{file}, line {number}: {line:.60}")
    return said["prompt"]


def _restored(job: Job, folder: Path, parallel: Parallel) -> tuple[Layout, Tree, Tree]:
    """Returns the model of a run on a layout, its parameters as it evaluates them, adapters merged, and other state."""
    model = resolve_model(job, resolve_loss(job))
    devices: Any = visible()
    if parallel == Parallel():
        devices = devices[:1]
    layout = compose(model, parallel, devices)
    like = state.abstract(layout, resolve_optimizer(job, layout.blueprint))
    placed = state.shardings(layout, like)
    like = jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), like, placed)
    spec = replace(job.checkpoint, replicas="mean")  # replicas that differ are sampled as the one model of theirs
    store = Store(folder / "checkpoints", spec, say=partial(print, file=sys.stderr), owned=False)
    trained, _ = store.restore(like)
    if not layout.blueprint.adapters:
        return layout, trained.eval_params, trained.model_state
    plain = compose(without_adapters(layout.blueprint), parallel, devices)
    placed = jax.tree.map(plain.sharding, plain.stored, is_leaf=lambda leaf: isinstance(leaf, jax.P))
    params = jax.jit(partial(merged, layout.blueprint), out_shardings=placed)(trained.eval_params)
    return plain, params, trained.model_state


def _stops(text: Text, stop: tuple[str, ...], ends: tuple[int, ...], drawn: list[int]) -> bool:
    if drawn[-1] in ends:
        return True
    # a text to stop at has at most as many tokens as bytes; a few more, as decoding may join those before it
    near = drawn[-max((len(each.encode(errors="surrogateescape")) for each in stop), default=0) - 8 :]
    return any(each in text.decode(near) for each in stop) if stop else False


def _said(text: Text, prompt: list[int], drawn: list[int], stop: tuple[str, ...], ends: tuple[int, ...]) -> str:
    """Returns the text that was added, up to where it stopped."""
    kept = drawn[:-1] if drawn and drawn[-1] in ends else drawn
    # with the prompt, as decoding may join what is at the seam
    before, whole = text.decode(prompt), text.decode([*prompt, *kept])
    said = whole[len(before) :] if whole.startswith(before) else text.decode(kept)
    at = [said.find(each) for each in stop if each in said]
    return said[: min(at)] if at else said


def _of_text(folder: Path, *, allow_import: bool) -> Job:
    """Returns the job of a run folder.

    Raises:
      JaxparError: If it holds none, or one whose run is not one model of text.
    """
    if not (folder / "job.toml").exists():
        raise refuse(
            f"{folder} holds no job.toml" + ("" if folder.is_dir() else ": it is no folder"),
            rule="text is generated by a trained run: a folder with a job.toml",
            fix="jaxpar train configs/quickstart.toml",
        )
    job = job_of(folder, allow_import=allow_import)
    if job.sweep.over:
        raise refuse(
            f"{folder} holds {job.sweep.count} members of a sweep",
            rule="text is generated by one model",
            fix="the settings of the best member, which the last line of the sweep names, in a job without [sweep]",
        )
    if not job.data.is_text:
        raise refuse(
            f"{folder} was trained on {job.data.source}",
            rule="text is generated by a model that was trained with data.source = 'text'",
            fix="a run with data.source = 'text'",
        )
    return with_own_tokenizer(job, folder)
