"""A job is trained: from its latest checkpoint, into its run folder.

RUN/job.toml        the resolved job, earlier ones beside it as job.0001.toml
RUN/metrics.jsonl   a line per step
RUN/run.json        versions, commit, devices  RUN/checkpoints/    the state
RUN/data/           packed tokens, tokenizer   RUN/tensorboard/    if asked for
RUN/events.jsonl    what was said of the run, and when: starts, faults, changes
RUN/output.log      what was said after the reader of the output went away
RUN/huggingface/    the tokenizer and config of the model it began with, where that was one of Hugging Face's
RUN/lock            who is at work in it         RUN/lineage.jsonl   who copied whom, in a sweep by pbt
"""

import io
import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxpar.buckets import Bucket, is_address, local_folder
from jaxpar.checkpoint import Store, start_from
from jaxpar.checkpoint.one_model import replicas_of
from jaxpar.cluster.connect import HEARTBEAT, connect
from jaxpar.cluster.environment import Cluster, detect
from jaxpar.errors import JaxparError, describe_exception, refuse
from jaxpar.files import make_folder, write_json
from jaxpar.job import pretrained, sweep
from jaxpar.job.build import Built, build, rate_jump
from jaxpar.job.file import changes
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.run_folder import check_folder, check_same_data
from jaxpar.job.file.schema import Job
from jaxpar.job.file.trained_job import lost_files
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.candidate import candidate_of
from jaxpar.job.parts.loggers import resolve_loggers
from jaxpar.job.parts.measures import derived_of
from jaxpar.job.parts.models import sound
from jaxpar.job.parts.names import COUNTED
from jaxpar.job.parts.optimizers import best_of
from jaxpar.measure.record import versions
from jaxpar.measure.where import where
from jaxpar.mesh.chips import find_chip
from jaxpar.mesh.devices import describe, is_simulated
from jaxpar.models.huggingface.folder import is_folder
from jaxpar.parallel.pipe import UNNAMED
from jaxpar.step import state
from jaxpar.step.inspectable import model_flop
from jaxpar.step.step import Step
from jaxpar.train import loop
from jaxpar.train.faults import Watch
from jaxpar.train.live.waiting import waiting
from jaxpar.train.lock import Lock
from jaxpar.train.metrics import Log
from jaxpar.train.noise import Noise
from jaxpar.train.progress import Progress
from jaxpar.train.skipped_batches import SkippedBatches
from jaxpar.train.watchdog import meeting
from jaxpar.train.watchdog.judge import SLOW
from jaxpar.train.watchdog.thread import SingleProcess, WatchdogThread, forget

SCHEDULE = "parallel.pipeline.schedule"  # which a job may leave to its devices


def train(job: Job, *, at: int | None = None, stream=None) -> dict[str, Any]:
    """Trains a job to its last step, or until a signal asks it to stop; returns how it ended.

    Args:
      job: The job.
      at: The step of the checkpoint to go on from; the newest by default. Newer ones are set aside.
      stream: Where to print progress; the standard output by default.

    Raises:
      JaxparError: With the problems of the job, its data, its run folder or its loss.
    """

    def say(text: str) -> None:
        print(text, file=stream or sys.stdout, flush=True)

    folder = local_folder(job.run.dir)
    bucket = Bucket(job.run.dir, say) if is_address(job.run.dir) else None
    watchdog = _meet(job, folder)
    try:
        if bucket and watchdog.count > 1:
            raise refuse(
                f"run.dir = {job.run.dir!r:.200} with {watchdog.count} processes",
                rule="several processes write one folder, each its part, and find each other there",
                fix="a bucket that is mounted on all hosts (gcsfuse, mountpoint-s3), and its folder",
            )
        watchdog.agree("job", dumps(job) + "".join(f"{name} {version}\n" for name, version in versions().items()))
        store = Store(folder / "checkpoints", job.checkpoint, committed=bucket.push if bucket else None)
        if bucket is None:
            check_folder(job, folder)

        with (
            Lock(folder, say) if watchdog.process == 0 else nullcontext(),
            bucket.following() if bucket else nullcontext(),
        ):
            steps = check_folder(job, folder)
            if at is not None:
                steps = _go_back(store, steps, at, say if watchdog.process == 0 else None)
            changed = changes.changes(folder, job) if steps else []
            with waiting("reading the data, laying out the model", stream or sys.stdout):
                built = build(job, processes=watchdog.count)
            changed += _check_same_run(folder, built, steps)
            watchdog.agree("data", built.source.fingerprint)
            watchdog.agree("list of checkpoints", str(steps))
            make_folder(folder)
            result = _train(job, built, store, watchdog, steps, changed, stream)
        watchdog.close()
        return result
    except JaxparError as error:
        watchdog.close(f"failed: {error.problems[0].got}")
        raise
    except (ValueError, RuntimeError, OSError) as error:
        meant = watchdog.explain(error)
        watchdog.close(f"failed: {describe_exception(meant)}")
        if meant is error:
            raise
        raise meant from error
    finally:
        watchdog.close(
            "failed: it ended before the run did"
        )  # whatever ended it: else its thread would say that it lives


def _meet(job: Job, folder: Path) -> SingleProcess:
    """Returns the processes of the run, connected."""
    cluster = detect(os.environ)
    if cluster is None:
        if os.environ.get("JAXPAR_ATTEMPT"):  # the only one that was launched adds up as several would, bit for bit
            connect(Cluster(coordinator=os.environ["JAXPAR_COORDINATOR"], processes=1, process=0, source="launch"))
        return SingleProcess()
    make_folder(folder)
    attempt = ""
    if cluster.process == 0:
        forget(folder)
        attempt = meeting.begin(folder)
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from us  # pyright: ignore
    # JAX ends processes without a word of whose fault it is: its own heartbeat comes in only after ours has spoken
    heartbeat = HEARTBEAT + math.ceil(job.run.timeout)
    attempt = connect(
        cluster, timeout=job.run.timeout * SLOW, heartbeat=heartbeat, word=attempt,
        check=lambda word: meeting.look(folder, word, process=cluster.process),
    )  # fmt: skip
    return WatchdogThread(folder, attempt, process=cluster.process, count=cluster.processes, limit=job.run.timeout)


def _train(
    job: Job,
    built: Built,
    store: Store,
    watchdog: SingleProcess,
    steps: list[int],
    changed: list[changes.Change],
    stream,
) -> dict[str, Any]:
    folder, first = local_folder(job.run.dir), watchdog.process == 0
    if watchdog.count > 1:
        for step in built.steps:
            step.agree, step.compiling = watchdog.agree, watchdog.compiling
    devices = list(built.layout.on.devices.flat)
    progress = Progress(
        job.train.steps, every=job.metrics.show_every, unit=COUNTED.get(job.train.loss, "loss terms"),
        flops=step_flop(built), batch=job.train.global_batch, peak=_peak(devices),
        stream=stream if first else io.StringIO(), events=_events(folder, steps) if first else None,
    )  # fmt: skip
    store.say, store.replicas = progress.say, replicas_of(built.layout)
    with progress:
        progress.waits("restoring the state" if steps else "making the state")
        watchdog.at(0, "restoring" if steps else "starting")
        start, at = store.restore(built.step.abstract()) if steps else (_begin(built, progress), 0)
        changes.check(changed, job, at)  # after arrays that do not fit, which no word mends
        lost = lost_files(folder) if steps else []
        if first:  # one writer
            changes.keep(folder, job)
            write_json(folder / "run.json", record(built))
        loggers = resolve_loggers(job) if first else ()
        log = Log(folder, job.metrics, start=at, writes=first, loggers=loggers, say=progress.say)
        batch = job.train.global_batch
        rate, phases = job.optimizer.said_at(batch), job.train.growth.said(batch)
        about = [built.layout.summary(), *built.layout.notes, *filter(None, [rate, phases, _unmeasured(built)])]
        about += getattr(built.source, "notes", ())
        about.append(f"{describe(devices)}, {folder}")
        progress.say("\n".join(about) + (f", on from step {at}" if at else ""))
        for each in lost:
            progress.say(each)
        for change in changed:
            progress.say(f"changed since step {at}: {change}")
        if jump := rate_jump(built, log.recent[-1] if log.recent else {}, at):
            progress.say(jump)
        if at >= job.train.steps:
            progress.say(f"nothing to do: trained to step {at} of {job.train.steps}; raise train.steps to go on")
        run = _loop(built, store, log, progress, watchdog)
        try:
            outcome = loop.run(run, start)
        finally:
            store.close()
            log.close()
        if job.sweep.over and first:
            progress.say("\n".join(sweep.ended(folder, job.sweep)))
        for note in built.step.layout.notes[len(built.layout.notes) :]:  # what was known when the step was traced
            progress.say(note)
        if built.step.products is not None:
            progress.say("\n".join([str(built.step.products), *built.step.products.notes]))
        if first:
            write_json(folder / "run.json", record(built) | {"peak": peak(built.step, devices)})
        if outcome.stopped_by:
            done = int(outcome.state.step)
            progress.say(f"stopped by {outcome.stopped_by}, saved step {done}; the same command goes on from there")
        ways, last = built.layout.replicas * job.train.accumulate, batch * job.train.growth.factor(job.train.steps - 1)
        if noise := run.noise.said(last, ways):
            progress.say(noise)
    return {
        "run": str(folder),
        "step": int(outcome.state.step),
        "stopped_by": outcome.stopped_by,
        "resumed_from": at,
        "last": outcome.last,
        "suggested_batch": run.noise.suggested(ways),
    }


def _unmeasured(built: Built) -> str:
    """Returns why the temperature of the updates is not written, though the job asks for it; "" where it is."""
    if not built.job.metrics.noise_every or built.source.examples is not None:
        return ""
    named = built.job.data.source
    return f"noise_temperature is not written: data.source = {named!r} has no `examples`, the number to train on"


def _events(folder: Path, steps: list[int]) -> Path:
    """Returns the file of what is said of a run; that of one which starts anew is empty."""
    file = folder / "events.jsonl"
    if not steps:
        file.unlink(missing_ok=True)
    return file


def _begin(built: Built, progress: Progress) -> state.State:
    """Returns the state of a new run, with parameters of another where the job says so."""
    train, spec = built.job.train, built.job.checkpoint
    if is_folder(spec.start_from):
        made, said = pretrained.begin(built)
        progress.say(said)
        return made
    made = state.init_state(built.layout, built.optimizer, seed=train.seed, offload=train.offload)
    if spec.start_from:
        made, origin = start_from.start(spec, made, built.layout, built.optimizer)
        progress.say(str(origin))
    return made


def step_flop(built: Built) -> float:
    """Returns the model's FLOP per step, 0 where no MFU is shown: on simulated or unknown devices."""
    if not _peak(list(built.layout.on.devices.flat)):
        return 0.0
    return model_flop(built.step, abstract_batch(built.job))


def record(built: Built) -> dict[str, Any]:
    """Returns the facts about its machine and software that a run records."""
    return where() | {
        "devices": describe(list(built.layout.on.devices.flat)),
        "mesh": built.layout.sizes,
        "data": built.source.fingerprint,
        "parameters": sum(place.leaf.size for place in built.layout.placements.values()),
        "schedule": _schedule(built),
        "chosen": [*built.layout.notes],
        "summary": built.layout.summary(),
        "placed": {path: built.layout.describe(path) for path in built.layout.placements},
        "layout": built.layout.to_dict(),
        "candidate": _candidate(built),
    }


def _candidate(built: Built) -> dict[str, Any]:
    """Returns the layout as the planner weighs it; nothing where it cannot."""
    try:
        return asdict(candidate_of(built.job, built.layout))
    except JaxparError:
        return {}


def peak(step: Step, devices: list[Any]) -> dict[str, Any]:
    """Returns the bytes of a device: those that XLA planned, and the most that were in use on one that is here."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    here = [stats for device in own if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats]
    measured = max([stats["peak_bytes_in_use"] for stats in here], default=None)
    return {"compiled": step.needed, "measured": measured}


def _loop(built: Built, store: Store, log: Log, progress: Progress, watchdog: SingleProcess) -> loop.Run:
    job, train = built.job, built.job.train
    skipped = SkippedBatches(local_folder(job.run.dir), fresh=not store.steps())
    noise = Noise(job.metrics.noise_every, momentum=job.optimizer.momentum, examples=built.source.examples)
    noise.resume(log.measured)
    back = job.checkpoint.every * (job.checkpoint.keep_last + job.checkpoint.keep_best)  # how far a rollback may go
    return loop.Run(
        step=built.step, source=built.source, steps=train.steps, global_batch=train.global_batch,
        eval_every=train.eval_every, eval_batches=train.eval_batches, checkpoints=job.checkpoint,
        ahead=job.data.ahead, sets=built.sets, store=store, log=log, progress=progress,
        learning_rate=built.learning_rate, watchdog=watchdog,
        watch=Watch(job.faults, log.recent, span=back, skipped=log.skipped), good=sound(job), skipped=skipped,
        noise=noise, growth=train.growth, best=best_of(job), derived=derived_of(job), larger=built.larger,
    )  # fmt: skip


def _go_back(store: Store, steps: list[int], at: int, say: Callable[[str], None] | None) -> list[int]:
    """Returns the steps up to one of them; the process that says so sets aside those after it."""
    if at not in steps:
        raise refuse(
            f"no checkpoint of step {at} in {store.folder}",
            rule="a run goes on from a checkpoint",
            fix=f"--from {steps[-1]}; there are {', '.join(map(str, steps[-8:]))}"
            if steps
            else "train it first: jaxpar train JOB",
        )
    if say and (left := store.leave(at)):
        say(f"on from step {at}: what was saved after it is called {', '.join(left)} now")
    return [step for step in steps if step <= at]


def _check_same_run(folder: Path, built: Built, steps: list[int]) -> list[changes.Change]:
    """Refuses to go on with other data than the run began with; returns what other devices change."""
    recorded = check_same_data(folder, built.source.fingerprint) if steps else {}
    was, now = recorded.get("schedule"), _schedule(built)
    unnamed = built.job.parallel.pipeline.schedule == UNNAMED
    return [changes.Change(SCHEDULE, was, now)] if unnamed and was and now and was != now else []


def _schedule(built: Built) -> str:
    """Returns the name of the schedule that runs, nothing without a pipeline."""
    layout = built.layout
    return layout.parallel.pipeline.schedule if layout.sizes["pipe"] > 1 else ""


def _peak(devices: list[Any]) -> float:
    if not devices or is_simulated(devices):
        return 0.0
    chip = find_chip(devices[0].device_kind)
    return chip.bf16_flops * len(devices) if chip else 0.0
