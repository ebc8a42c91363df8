"""Samples text from a trained run, on one device or on any layout of data, fsdp and tensor."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jaxpar.buckets import pull_folder
from jaxpar.data.spec import OURS
from jaxpar.data.tokens import RunTokenizer
from jaxpar.errors import Keywords, refuse
from jaxpar.files import write_text
from jaxpar.job.file.parse import loads
from jaxpar.job.file.run_folder import read_job
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import end_tokens, with_saved_tokenizer
from jaxpar.job.run_weights import HUGGINGFACE_FOLDER, restore_run
from jaxpar.mesh.devices import is_simulated, simulate
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import without_adapters
from jaxpar.sharding.names import Tree
from jaxpar.step.model import eval_model
from jaxpar.step.sampling import Generator, Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingRequest(Keywords):
    """Settings of a sampling request.

    Attributes:
      tokens: Maximal number of new tokens per prompt.
      sampling: Temperature, top_k, top_p and seed.
      stop: Strings, or special tokens such as <|eot_id|>; the text ends before the first of them.
      overrides: Overrides of `parallel` and `mesh`, e.g. `parallel.tensor=2`, `mesh.simulate=8`; one device by default.
      cached: Whether to use a KV cache; None uses one if the model supports it.
    """

    tokens: int = 200
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    cached: bool | None = None

    def __post_init__(self):
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise refuse(f"tokens {self.tokens!r}", rule="tokens is at least 1", fix="--tokens 200")
        if errors := [text for text in self.overrides if not text.startswith(("parallel.", "mesh."))]:
            raise refuse(
                f"{errors[0]!r:.80} of a trained run",
                rule="overrides of a sampled run only say where: parallel and mesh",
                fix="parallel.tensor=2",
            )
        if not all(self.stop):
            raise refuse("an empty text to stop at", rule="a stop text is not empty", fix='--stop "\\n\\n"')


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A continued prompt.

    Attributes:
      prompt: The prompt.
      text: The continuation.
      tokens: Number of drawn tokens.
    """

    prompt: str
    text: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Continued prompts.

    Attributes:
      answers: Answers in the order of the prompts.
      rate: Tokens per second over all prompts, including start and compilation; 0 on simulated devices, whose timings
        say nothing about GPUs.
    """

    answers: tuple[Answer, ...]
    rate: float


def sample(
    folder: str | Path, prompts: Sequence[str], request: SamplingRequest, *, allow_import: bool = False
) -> Answers:
    """Continues prompts with the model of a run.

    Args:
      folder: The run folder.
      prompts: The prompts.
      request: Sampling settings.
      allow_import: Whether the run's job may import Python objects from any module.

    Raises:
      JaxparError: If the folder has no trained text model, or a prompt is empty.
    """
    model = load_text_model(folder, request, allow_import=allow_import)
    for prompt in prompts:
        check_prompt(prompt, f"the prompt {prompt!r:.60}")
    rows = [model.text.encode(prompt) for prompt in prompts]
    if not rows or not all(rows):
        raise refuse("an empty prompt", rule="a prompt has at least one token", fix='--prompt "\\n"')
    started = time.monotonic()
    texts = model.continue_rows(rows, request)
    seconds, token_count = time.monotonic() - started, sum(count for _, count in texts)
    rate = 0.0 if is_simulated(list(model.generator.layout.device_mesh.devices.flat)) else token_count / seconds
    answers = [
        Answer(prompt=prompt, text=text, tokens=count) for prompt, (text, count) in zip(prompts, texts, strict=True)
    ]
    return Answers(answers=tuple(answers), rate=rate)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """The restored model of a run, with its tokenizer.

    Attributes:
      text: The tokenizer.
      generator: The model on its layout.
      ends: End-of-text tokens.
      tokenizer: The folder of the run's saved Hugging Face tokenizer; "" for jaxpar's own tokenizers.
    """

    text: RunTokenizer
    generator: Generator
    ends: tuple[int, ...]
    tokenizer: str

    def continue_rows(self, rows: Sequence[list[int]], request: SamplingRequest) -> list[tuple[str, int]]:
        """Continues each row of tokens; returns its new text, up to a stop, and the number of drawn tokens."""
        tokens = {item: self.text.special(item) for item in request.stop}  # decoded text does not show special tokens
        ends = (*self.ends, *(item for item in tokens.values() if item is not None))
        stop = tuple(item for item, token in tokens.items() if token is None)
        stops = partial(_stops, self.text, stop, ends)
        results = self.generator.generate(
            rows, request.sampling, max_new_tokens=request.tokens, stops=lambda _, drawn: stops(drawn)
        )
        return [
            (_decode_new(self.text, row, item, stop, ends), len(item)) for row, item in zip(rows, results, strict=True)
        ]


def load_text_model(folder: str | Path, request: SamplingRequest, *, allow_import: bool = False) -> TextModel:
    """Restores the model of a run for sampling.

    Raises:
      JaxparError: If the folder has no trained text model.
    """
    folder = pull_folder(folder)
    job = _text_job(folder, allow_import=allow_import)
    placement = loads("", [*request.overrides])
    if placement.mesh.simulate:
        simulate(placement.mesh.simulate)
    text = RunTokenizer(folder / "data", job.data.tokenizer)
    layout, params, model_state = _restore(job, folder, placement.parallel if request.overrides else Parallel())
    generator = Generator(
        layout, params, model_state, window=job.data.seq, vocab_size=text.size, cached=request.cached
    )  # padding rows of the vocabulary are never drawn
    tokenizer = "" if job.data.tokenizer in OURS else job.data.tokenizer
    return TextModel(
        text=text, generator=generator, ends=end_tokens(job, folder, folder / HUGGINGFACE_FOLDER), tokenizer=tokenizer
    )


def check_prompt(prompt: str, where: str) -> None:
    """Refuses lone surrogates in a prompt, except Python's escapes of non-UTF-8 bytes in a command line.

    Raises:
      JaxparError: If there is a lone surrogate.
    """
    if half := re.search("[\ud800-\udc7f\udd00-\udfff]", prompt):
        raise refuse(
            f"{where} has half of a surrogate pair, \\u{ord(half[0]):x}",
            rule="a prompt is Unicode",
            fix="without that character",
        )


def read_prompts(file: Path) -> list[str]:
    """Reads prompts: the `prompt` of each line of a .jsonl file, or each non-empty line of any other file.

    Raises:
      JaxparError: If the file cannot be read or is empty, or a line is not a prompt; the message gives its number.
    """
    rule, fix = "a file of prompts has one a line, or in .jsonl tables with `prompt`", '{"prompt": "Once upon"}'
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # str.splitlines also splits at U+2028, inside of a prompt
    except (OSError, ValueError) as error:
        raise refuse(f"{file}: {getattr(error, 'strerror', None) or 'no utf-8'}", rule=rule, fix=fix) from error
    if file.suffix != ".jsonl":
        prompts = [line for line in lines if line]
    else:
        prompts = [_prompt(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise refuse(f"{file} holds no prompt", rule=rule, fix=fix)
    return prompts


def write_answers(file: Path, answers: Answers) -> None:
    """Writes one JSON line per answer: prompt, text, tokens."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in answers.answers]
    write_text(file, "".join(f"{line}\n" for line in lines))


def _prompt(file: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
        raise refuse(
            f"{file}, line {number}: {line:.60}",
            rule="a line of .jsonl is a table with a `prompt`, a text that is not empty",
            fix='{"prompt": "Once upon"}',
        )
    check_prompt(entry["prompt"], f"{file}, line {number}: {line:.60}")
    return entry["prompt"]


def _restore(job: Job, folder: Path, parallel: Parallel) -> tuple[Layout, Tree, Tree]:
    """Restores a run's layout, evaluation parameters (with merged adapters), and other model state."""
    layout, result = restore_run(job, folder, parallel)
    devices: Any = [*layout.device_mesh.devices.flat]
    is_plain = layout.blueprint.base is None
    plain = layout if is_plain else compose(without_adapters(layout.blueprint), parallel, devices)
    return plain, *eval_model(layout, result)


def _stops(text: RunTokenizer, stop: tuple[str, ...], ends: tuple[int, ...], drawn: list[int]) -> bool:
    if drawn[-1] in ends:
        return True
    # a stop string has at most as many tokens as bytes; a few more, as decoding may merge it with earlier tokens
    tail = drawn[-max((len(stop_text.encode(errors="surrogateescape")) for stop_text in stop), default=0) - 8 :]
    return any(stop_text in text.decode(tail) for stop_text in stop) if stop else False


def _decode_new(
    text: RunTokenizer, prompt: list[int], drawn: list[int], stop: tuple[str, ...], ends: tuple[int, ...]
) -> str:
    """Decodes the new text, up to the first stop string."""
    body = drawn[:-1] if drawn and drawn[-1] in ends else drawn
    # decoded together with the prompt, as decoding may merge tokens across the seam
    prompt_text, full_text = text.decode(prompt), text.decode([*prompt, *body])
    new_text = full_text[len(prompt_text) :] if full_text.startswith(prompt_text) else text.decode(body)
    positions = [new_text.find(stop_text) for stop_text in stop if stop_text in new_text]
    return new_text[: min(positions)] if positions else new_text


def _text_job(folder: Path, *, allow_import: bool) -> Job:
    """Returns the job of a text run.

    Raises:
      JaxparError: If the folder has no job, or the job does not train a single text model.
    """
    if not (folder / "job.toml").exists():
        raise refuse(
            f"{folder} holds no job.toml" + ("" if folder.is_dir() else ": it is no folder"),
            rule="text is generated by a trained run: a folder with a job.toml",
            fix="jaxpar train configs/quickstart.toml",
        )
    job = read_job(folder, allow_import=allow_import)
    if job.sweep.over:
        raise refuse(
            f"{folder} holds {job.sweep.count} members of a sweep",
            rule="text is generated by one model",
            fix="train a job without [sweep], with the best member's settings, which the sweep printed at its end",
        )
    if not job.data.is_text:
        raise refuse(
            f"{folder} was trained on {job.data.source}",
            rule="text is generated by a model that was trained with data.source = 'text'",
            fix="a run with data.source = 'text'",
        )
    return with_saved_tokenizer(job, folder)
