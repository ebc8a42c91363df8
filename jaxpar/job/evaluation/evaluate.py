"""Evaluates a trained model: the sums of its loss and metrics over each set, divided once by their counts.

    checkpoint ─► parameters to evaluate ─┐
    sets ───────► batches ────────────────┴─► sums and counts ─► means ─► perplexity, bits per byte
      └─► targets that count ─► bytes of their text ─────────────────────────────────┘

The numbers are those of an evaluation during training, on any mesh.
"""

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

from jaxpar.buckets import local_folder, pull_folder
from jaxpar.data.streams.sets import AllExamples, EvaluationSet, open_all
from jaxpar.data.text import Tokens
from jaxpar.errors import JaxparError, Keywords, refuse
from jaxpar.job.check import resolve
from jaxpar.job.evaluation.evaluated_model import EvaluatedModel
from jaxpar.job.evaluation.open_model import is_checkpoint, open_pretrained, open_run
from jaxpar.job.evaluation.text_bytes import TextSize, text_size
from jaxpar.job.file.imports import import_object
from jaxpar.job.file.run_folder import NAME
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import open_data, open_sets
from jaxpar.job.parts.measures import resolve_measures
from jaxpar.job.parts.models import batch_spec
from jaxpar.job.parts.names import counted_unit
from jaxpar.mesh.devices import simulate, visible_devices
from jaxpar.models.huggingface.folder import hub_download, is_folder, newest_snapshot
from jaxpar.optim.wrappers import freeze
from jaxpar.step.evaluation_loss import derive_measures
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train.api.train_step import train_step
from jaxpar.train.feed import Feed
from jaxpar.train.loop import evaluation_totals
from jaxpar.train.progress import Progress
from jaxpar.train.run import Run

FIRST = ("loss", "perplexity", "bits_per_byte")  # the order of metrics; the others follow


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(Keywords):
    """The checkpoints and the data to evaluate.

    Attributes:
      checkpoints: last, all, best (by the run's `checkpoint.best`), or steps such as "100,200".
      overrides: Overrides of data, parallel, mesh, metrics and some keys of train. With data.source or data.path all
        examples of these data are evaluated; otherwise the run's held-out examples and its sets.
    """

    checkpoints: str = "last"
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SetScores:
    """The metrics of a checkpoint on a set.

    Attributes:
      step: The step of the checkpoint; None for a Hugging Face folder.
      set: The name of the set; "" for the held-out examples, or for the data of the overrides.
      count: The tokens (or examples) over which the loss is a mean.
      metrics: The loss, and other metrics by name.
    """

    step: int | None
    set: str
    count: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
      model: The folder that was evaluated.
      main: The name to print for the set "": held out, or the data that the overrides name.
      unit: What `count` counts: tokens, examples or loss terms.
      scores: Scores by checkpoint and set.
      notes: What the scores leave out, and why.
    """

    model: str
    main: str
    unit: str
    scores: tuple[SetScores, ...]
    notes: tuple[str, ...]


def evaluate(folder: str | Path, request: EvaluationRequest, *, allow_import: bool = False) -> EvaluationResult:
    """Evaluates checkpoints of a run, or a Hugging Face folder.

    Args:
      folder: A run folder, one checkpoint in it, or a Hugging Face folder.
      request: What to evaluate.
      allow_import: Whether the job may import Python objects from any module.

    Raises:
      JaxparError: If the folder is neither, or there is no such checkpoint or no example to evaluate.
    """
    path = pull_folder(folder)
    with tempfile.TemporaryDirectory(prefix="jaxpar-evaluate-") as work:
        model = _open_model(path, str(folder), request, Path(work), allow_import=allow_import)
        return _evaluate(model, str(folder))


def _open_model(
    path: Path, folder: str, request: EvaluationRequest, work: Path, *, allow_import: bool
) -> EvaluatedModel:
    arguments = (path, request.checkpoints, request.overrides, work)
    if (path / NAME).is_file() or is_checkpoint(path):
        return open_run(*arguments, allow_import=allow_import)
    if is_folder(path):
        return open_pretrained(*arguments, allow_import=allow_import)
    fix = "jaxpar evaluate runs/quickstart, after jaxpar train configs/quickstart.toml"
    if snapshot := newest_snapshot(path):
        fix = f"jaxpar evaluate {snapshot}"
    elif not path.is_dir() and (download := hub_download(folder)):
        fix = f"{download[0]}, then jaxpar evaluate {download[1]}; or {fix}"
    raise refuse(
        f"{folder} holds no {NAME} and no config.json" if path.is_dir() else f"{folder} is no folder",
        rule="a run folder, which jaxpar train wrote, or a Hugging Face folder is evaluated",
        fix=fix,
    )


def _evaluate(model: EvaluatedModel, name: str) -> EvaluationResult:
    job = model.job
    if job.mesh.simulate:
        simulate(job.mesh.simulate)
    step = _build_step(job, several=model.several)
    feeds = _open_feeds(model, step)
    sizes = {key: text_size(job, key, feed) for key, feed in feeds.items()}
    run = _evaluation_run(job, step, next(iter(feeds.values())))
    scores = []
    for number in model.steps:
        state = model.read_state(step, number)
        scores += [_score(run, state, feed, number, key, sizes[key]) for key, feed in feeds.items()]
        del state
    main = _main_name(model)
    notes = [note for key, feed in feeds.items() for note in _note_omissions(job, key or main, feed)]
    notes += dict.fromkeys(sizes[score.set].why_unknown(score.count) for score in scores)
    return EvaluationResult(
        model=name,
        main=main,
        unit=counted_unit(job),
        scores=tuple(scores),
        notes=tuple(filter(None, notes)),
    )


def _main_name(model: EvaluatedModel) -> str:
    if not model.choice.is_other:
        return "held out"
    return str(model.job.data.path or model.job.data.source)


def _build_step(job: Job, *, several: bool) -> Step:
    """Builds the step that evaluates; its state has no optimizer, unless it is several models."""
    devices = visible_devices()
    if job.mesh.devices > len(devices):
        raise refuse(
            f"mesh.devices = {job.mesh.devices}, {len(devices)} visible ({devices[0].platform})",
            rule="a model is evaluated on devices that are there",
            fix=f"mesh.devices={len(devices)}, or mesh.simulate={job.mesh.devices} mesh.devices=0",
        )
    resolved = resolve(job, devices[: job.mesh.devices or None], publishes=False)
    if resolved.problems or resolved.layout is None or resolved.loss is None or resolved.optimizer is None:
        raise JaxparError(*resolved.problems)
    return train_step(
        resolved.layout, resolved.loss, resolved.optimizer if several else _no_optimizer(job), seed=job.train.seed,
        precision=job.train.precision, collectives=job.train.collectives, measures=resolve_measures(job),
    )  # fmt: skip


def _no_optimizer(job: Job) -> optax.GradientTransformation:
    """Returns an optimizer without state, to which the frozen base of adapters stays frozen, as 8 bits must be."""
    frozen, trained = job.train.frozen
    return freeze(optax.identity(), frozen, but=trained) if frozen else optax.identity()


def _open_feeds(model: EvaluatedModel, step: Step) -> dict[str, Feed]:
    """Opens the batches of each set; "" is the held-out examples, or the data that overrides name."""
    job = model.job
    sets: dict[str, EvaluationSet] = {}
    if main := _open_main(model):
        sets[""] = main
    sets |= open_sets(job)
    if not sets:
        raise refuse(
            f"data.source = {job.data.source!r} holds no example out, and data.sets is empty",
            rule="a run is evaluated on its held-out examples, or on other data",
            fix="data.path=FILE of other data, or data.sets.test.path=FILE",
        )
    first: Any = next(iter(sets.values()))
    base = Feed(first, step.layout, job.train.global_batch, good=batch_spec(job))
    return {name: base.evaluation_feed(name, examples) for name, examples in sets.items()}


def _open_main(model: EvaluatedModel) -> EvaluationSet | None:
    job, choice = model.job, model.choice
    if choice.is_other and not choice.is_held_out:
        source = job.data.source
        named = import_object(source, "data.source", allowed=job.allow_import) if ":" in source else None
        folder = local_folder(job.run.dir) / "data"
        return open_all(job.data, "data", folder, job.train.global_batch, named=named)
    if not model.has_data or (job.data.is_text and not job.data.held_out):
        return None
    source = open_data(job)
    if not source.evaluation(0, job.train.global_batch):
        return None
    if not choice.is_other:
        model.check_data(source.fingerprint)
    return source


def _evaluation_run(job: Job, step: Step, feed: Feed) -> Run:
    return Run(
        step=step, source=feed.source, steps=0, global_batch=job.train.global_batch,
        eval_batches=job.train.eval_batches, progress=Progress(0, every=1, stream=sys.stderr),
    )  # fmt: skip


def _score(run: Run, state: State, feed: Feed, number: int | None, name: str, size: TextSize) -> SetScores:
    totals = evaluation_totals(run, state, feed) or {}
    means = {key: total / count for key, (total, count) in totals.items() if count}
    metrics = run.step.gradients.evaluation_metrics(means)
    count = totals.get("loss", (0.0, 0.0))[1]
    metrics |= derive_measures(size.derived, metrics)
    if not size.why_unknown(count):
        metrics["bits_per_byte"] = metrics["loss"] * count / size.bytes / math.log(2)
    first = {key: metrics[key] for key in FIRST if key in metrics}
    return SetScores(step=number, set=name, count=count, metrics=first | metrics)


def _note_omissions(job: Job, name: str, feed: Feed) -> Iterator[str]:
    """Reports which examples and tokens of a set are not evaluated, and which documents are cut."""
    most, examples = job.train.eval_batches, feed.source
    if most and feed.read_evaluation(most):
        yield (
            f"{name}: the first {most} batches of {job.train.global_batch} examples are evaluated, as "
            f"train.eval_batches = {most}; train.eval_batches=0 evaluates all"
        )
    text = examples.source if isinstance(examples, AllExamples) else None
    yield from (f"{name}: {note}" for note in getattr(text or examples, "notes", ()))
    if isinstance(text, Tokens) and text.spec.documents == "mixed" and (rest := (len(text.tokens) - 1) % text.spec.seq):
        yield f"{name}: the last {rest} tokens are left out, as they do not fill a row of data.seq = {text.spec.seq}"
