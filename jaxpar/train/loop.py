"""The training loop: feeds batches to steps, keeps at most two steps in flight, writes metrics, evaluates and saves.

    batch(i) ─► step i ─► in flight (at most 2) ─► row i ─► metrics.jsonl, progress
                                                     └─► at intervals: save, evaluate; scores go to row and checkpoint

After a stop signal, the loop finishes and saves the current step, without an evaluation.

With two steps in flight a GPU never waits for the host, and metrics arrive one step late. (On simulated devices `Step`
itself limits the steps in flight: a loop of 40 unblocked steps aborted on jax 0.10.2.)
"""

import collections
import math
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxpar.checkpoint import processes
from jaxpar.checkpoint.listing import read_scores
from jaxpar.checkpoint.writing import SaveSchedule
from jaxpar.errors import JaxparError
from jaxpar.step.evaluation_loss import derive_measures, evaluation_names
from jaxpar.step.memory_error import is_out_of_memory
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.step.stochastic_loss import key_parameter
from jaxpar.train.faults import learns_nothing
from jaxpar.train.feed import Feed, Reader
from jaxpar.train.incomplete_batches import Totals, weighted_totals
from jaxpar.train.memory_explanation import name_saved_state
from jaxpar.train.metrics import is_evaluated
from jaxpar.train.noise import SMALL
from jaxpar.train.recovery import Stop, can_save, check_before_save, roll_back, saves_before_errors, say_saved
from jaxpar.train.run import Outcome, Run

IN_FLIGHT = 2


def run(job: Run, state: State) -> Outcome:
    """Trains from `state.step` to `job.steps`.

    Raises:
      JaxparError: If a step or a batch is bad and the job stops at it, after which nothing is saved; if the last
        state cannot be saved.
    """
    feed = Feed(
        job.source, job.step.layout, job.global_batch, good=job.good, skipped=job.skipped, faults=job.watch.faults,
        growth=job.growth, say=job.progress.say if job.progress else print,
    )  # fmt: skip
    stop = Stop(feed.say)
    with stop.handle_signals():
        first = int(state.step)
        ended = first >= job.steps
        if ended or (job.eval_every and first and first % job.eval_every == 0):
            stopped_by = _score_resumed_step(job, state, feed, stop)
            if ended or stopped_by or _is_over(job):
                return Outcome(state=state, last={}, stopped_by=stopped_by)
        while True:
            start = int(state.step)
            try:
                # batches that were not checked before their steps are kept until their metrics arrive
                kept = IN_FLIGHT if job.good is None and not job.growth.phases else 0
                with Reader(feed, ahead=job.ahead, last=job.steps, kept=kept) as reader:
                    return _train_until_end(job, state, feed, reader, stop)
            except (JaxparError, jax.errors.JaxRuntimeError) as error:
                if is_out_of_memory(error) and job.step.explain:
                    raise name_saved_state(job, error) from error
                if not isinstance(error, JaxparError):
                    raise
                state = roll_back(job, error, start)
            finally:
                job.trace.close()


def _train_until_end(job: Run, state: State, feed: Feed, reader: Reader, stop: Stop) -> Outcome:
    """Trains until the run ends; a bad step raises."""
    start = int(state.step)
    rows = _RowsInFlight(job, reader)
    stopped: str | None = None
    due, postponed = SaveSchedule(job.checkpoints, start=start), False

    def rescue() -> None:
        rows.land()
        if can_save(job, state, start):
            step = int(state.step)
            say_saved(job, step, partial(_save, job, state, step, rows.newest, last=True))

    with saves_before_errors(rescue):
        for index in range(start, job.steps):
            done = index + 1
            _report_activity(job, done, "reading the batch", first=index == start)
            batch, waited = reader.batch(index, rows.newest_in_flight)
            _report_activity(job, done, "training", first=index == start)
            step = job.compiled_step(index)
            if step is not job.compiled_step(max(index - 1, start)):  # the batch grows here, so this step compiles
                rows.land()
                if not job.watch.is_skipping:
                    due.mark_saved(index)
                    _save(job, state, index, rows.newest, last=False)  # written during the compilation
            job.trace.begin(done, rows.land)
            state, metrics = _step(job, step, state, batch, done)
            rows.add(done, metrics, waited)
            stopped = job.watchdog.stopping(stop.name, done)
            last = done == job.steps or stopped is not None
            evaluating = not stopped and bool(last or (job.eval_every and done % job.eval_every == 0))
            if stopped:
                _report_stop(job, stopped, done)
            lands = last or evaluating or postponed or due.may_save(done) or job.trace.ends(done)
            rows.land(leave=0 if lands else IN_FLIGHT - 1, evaluating=evaluating, shows=True)
            if job.trace.ends(done) or last:
                job.trace.end(done)
            postponed = due.is_due(done) or postponed
            saving = last or (postponed and not job.watch.is_skipping)  # no save: the state may cause the skips
            if saving:
                postponed = False
                _save(job, state, done, rows.newest, last=last)
            if evaluating:
                with stop.saving(partial(_save, job, state, done, rows.newest, last=True)):
                    stopped = _evaluate(job, state, feed, rows.newest, stop)
                rows.restart_clock()
            # if a signal interrupts an evaluation, the resumed run repeats it
            ends = last or bool(stopped) or (evaluating and _is_over(job))
            if ends or (evaluating and _is_best(job, done)):
                if not saving:
                    due.mark_saved(done)
                    _save(job, state, done, rows.newest, last=ends)
                elif ends and job.store:
                    job.store.finish()
            if ends:
                break
    return Outcome(state=state, last=rows.newest, stopped_by=stopped)


class _RowsInFlight:
    """The metrics of steps that the devices still compute, and the newest row that was written."""

    def __init__(self, job: Run, reader: Reader):
        self.job, self.reader, self.newest = job, reader, {}  # a list of all rows would grow without bound
        self._flying: collections.deque[tuple[int, Any, float]] = collections.deque()
        self.restart_clock()

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()

    @property
    def newest_in_flight(self) -> Any:
        return self._flying[-1][1] if self._flying else None

    def add(self, step: int, metrics: object, waited: float) -> None:
        self._flying.append((step, metrics, waited))

    def land(self, *, leave: int = 0, shows: bool = False, evaluating: bool = False) -> None:
        """Waits for the oldest steps and writes their rows, until `leave` are in flight.

        Args:
          leave: Number of steps that stay in flight.
          shows: Whether the progress shows the rows.
          evaluating: Whether an evaluation of the last step follows, with which its row is shown.
        """
        while len(self._flying) > leave:
            step, metrics, waited = self._flying.popleft()
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            now = time.perf_counter()
            values["input_wait_seconds"] = waited
            describe_batch = partial(self.reader.describe_batch, step - 1)
            self.newest = _row(self.job, step, values, now - self._clock, describe_batch)
            self._clock = now
            if self.job.log:
                self.job.log.write(self.newest)
            if shows and self.job.progress and (self._flying or not evaluating):
                self.job.progress.step(self.newest)


def _step(job: Run, step: Step, state: State, batch: Any, number: int) -> tuple[State, dict[str, Any]]:
    measured = {}
    if job.noise.is_due(number):
        batch = step.put(batch)
        measured = {SMALL: step.part_norm(state, batch)}
    state, metrics = step(state, batch, limit=job.watch.limit(number))
    return state, metrics | measured


def _report_stop(job: Run, reason: str, step: int) -> None:
    if job.progress:
        job.progress.say(f"{reason}: saving step {step}" if job.store else f"{reason}: step {step} is the last")


def _report_activity(job: Run, step: int, what: str, *, first: bool) -> None:
    """Reports the current activity to the watchdog, and at the first step also to the user."""
    job.watchdog.begin_activity(step, what)
    if first and job.progress:
        job.progress.show_activity({"training": "compiling the step"}.get(what, what))


def _is_over(job: Run) -> bool:
    """Returns whether early stopping ends the run, and prints the reason."""
    reason = job.best.stop_reason(job.log.evaluated) if job.log else ""
    if reason and job.progress:
        job.progress.say(reason)
    return bool(reason)


def _is_best(job: Run, step: int) -> bool:
    """Returns whether the evaluation of a step is among the best so far, so that its checkpoint is retained."""
    count = job.checkpoints.keep_best
    if not count or job.store is None or job.log is None or job.watch.is_skipping:
        return False
    return job.best.is_among_best(count, job.log.evaluated, step)


def _save(job: Run, state: State, step: int, row: dict[str, Any], *, last: bool) -> None:
    """Starts an asynchronous save of the state; if `last`, waits until it is on disk."""
    if job.store:
        job.watchdog.begin_activity(step, "saving")
        check_before_save(step, state.params)
        job.store.save(step, state, _scores(job, row))
        if last:
            job.store.finish()


def _evaluate(job: Run, state: State, feed: Feed, row: dict[str, Any], stop: Stop) -> str | None:
    """Evaluates the held-out examples; adds the scores to the row, and to the checkpoint of its step if one exists.

    Returns the signal that interrupted the evaluation, or None.
    """
    step = row["step"]
    job.watchdog.begin_activity(step, "evaluating")
    scores = evaluate(job, state, feed, stop)
    if scores:
        job.best.check(scores, keeps=job.checkpoints.keep_best)
    row |= scores or {}
    if scores and job.log:
        job.log.amend(scores, step=step)
    if scores and job.store:
        job.store.score(step, _scores(job, row))
    if job.progress and "loss" in row:
        job.progress.step(row)
    return stop.name if scores is None else None


def _score_resumed_step(job: Run, state: State, feed: Feed, stop: Stop) -> str | None:
    """Evaluates the step that a run resumes from if its checkpoint has no score, as the run ended before it."""
    step, store = int(state.step), job.store
    if store is None or not processes.broadcast(
        step in store.steps() and not is_evaluated(read_scores(store.folder, step))
    ):
        return None
    row: dict[str, Any] = {"step": step}
    stopped_by = _evaluate(job, state, feed, row, stop)
    if job.progress and len(row) > 1:
        scores = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if name != "step")
        job.progress.say(f"step {step} evaluated: {scores}")
    return stopped_by


def evaluate(job: Run, state: State, feed: Feed, stop: Stop | None = None) -> dict[str, float] | None:
    """Returns `eval_loss` etc. of the held-out examples, and `eval_NAME_loss` etc. of each set, e.g. NAME = wiki.

    A stop signal interrupts the evaluation, which then returns None. Only the signal of process 0 counts, as all
    processes must stop after the same batch.
    """
    scores: dict[str, float] = {}
    for name, evaluation_feed in {
        "": feed,
        **{name: feed.evaluation_feed(name, held_out) for name, held_out in job.sets.items()},
    }.items():
        means = _means(job, state, evaluation_feed, stop)
        if means is None:
            return None
        scored = job.step.gradients.evaluation_metrics(means)
        scored = scored | derive_measures(job.derived, scored)
        scores |= dict(zip(evaluation_names(scored, name), scored.values(), strict=True))
    return scores


def _means(job: Run, state: State, feed: Feed, stop: Stop | None) -> dict[str, float] | None:
    totals = evaluation_totals(job, state, feed, stop)
    return None if totals is None else {name: total / count for name, (total, count) in totals.items() if count}


def evaluation_totals(job: Run, state: State, feed: Feed, stop: Stop | None = None) -> Totals | None:
    """Returns the sums and counts of loss and measures over one set; None after a stop signal."""
    totals: Totals = {}
    index, first = 0, True
    say, draws = job.progress.say if job.progress else print, key_parameter(job.step.loss) is not None
    while not job.eval_batches or index < job.eval_batches:
        if stop is not None and (number := processes.broadcast(stop.number)):
            stop.name = signal.Signals(number).name
            return None
        evaluate = partial(job.step.evaluate, state)
        batch_totals = feed.incomplete.totals(feed, index, evaluate, first=first, draws=draws, say=say)
        if batch_totals is None:
            break
        totals, first = weighted_totals([(1.0, totals), (1.0, batch_totals[0])]), first and not batch_totals[1]
        index += 1
    return totals


def _row(
    job: Run, step: int, values: dict[str, float], seconds: float, describe_batch: Callable[[], str]
) -> dict[str, Any]:
    update = step - 1 - job.watch.skipped  # in the optimizer's step count, which skipped steps do not advance
    skipped = job.watch.judge(step, values, describe_batch)
    values = {name: value for name, value in values.items() if name != "skipped"}
    if learns_nothing(values) and job.progress:
        job.progress.say(
            f"step {step}: no example of its batch counts (a mask of zeros?): its loss is 0/0 and its gradient zero"
        )
    elif skipped and job.progress:
        job.progress.say(f"step {step} skipped: loss {values['loss']:.6g}, grad_norm {values['grad_norm']:.6g}")
    row = {"step": step, **values, "seconds": seconds, "tokens_per_second": values["tokens"] / seconds}
    if skipped:
        row["skipped"] = True
    rate = job.learning_rate(update) if job.learning_rate else None
    if rate is not None:
        row["learning_rate"] = rate
    size = job.global_batch * job.growth.factor(step - 1)
    if job.growth.phases:
        row["global_batch"] = size
    if SMALL in values:
        row |= job.noise.row(values, rate=rate, batch=size, parts=job.compiled_step(step - 1).parts)
    return row


def _scores(job: Run, row: dict[str, Any]) -> dict[str, float]:
    keys = dict.fromkeys(("loss", "eval_loss", *(f"eval_{name}_loss" for name in job.sets), job.best.metric))
    return {key: row[key] for key in keys if math.isfinite(row.get(key, math.nan))}
