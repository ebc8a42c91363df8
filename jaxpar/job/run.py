"""Trains a job in its run folder, from the latest checkpoint if there is one.

RUN/job.toml        the resolved job; earlier ones as job.0001.toml, ...
RUN/metrics.jsonl   a line per step
RUN/run.json        versions, commit, devices  RUN/checkpoints/    the training state
RUN/data/           packed tokens, tokenizer   RUN/tensorboard/    and others: loggers, if requested
RUN/events.jsonl    messages with their time: starts, faults, changes
RUN/loggers.json    ids of the run in loggers  RUN/profile/        traces of `train.profile`
RUN/output.log      messages after the standard output was closed
RUN/huggingface/    tokenizer and config of the pretrained Hugging Face model, if any
RUN/lock            the process that writes    RUN/lineage.jsonl   copies between members of a pbt sweep
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
from jaxpar.checkpoint.saved_replicas import describe_replicas
from jaxpar.cluster.connect import HEARTBEAT, connect
from jaxpar.cluster.environment import Cluster, detect
from jaxpar.errors import JaxparError, describe_exception, refuse
from jaxpar.files import make_folder, write_json
from jaxpar.job import run_weights, sweep
from jaxpar.job.build import BuiltJob, build, rate_jump
from jaxpar.job.file import run_folder
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.run_folder import check_folder, check_same_data, lost_files
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.measures import derived_metrics, resolve_loggers
from jaxpar.job.parts.models import batch_spec
from jaxpar.job.parts.names import counted_unit
from jaxpar.job.parts.optimizers import best_evaluation
from jaxpar.job.parts.plan_traced import layout_candidate
from jaxpar.measure.record import versions, where
from jaxpar.mesh.chips import find_chip
from jaxpar.mesh.devices import describe, is_simulated
from jaxpar.models.huggingface.folder import is_folder
from jaxpar.parallel.declaration import UNNAMED
from jaxpar.step.init_state import init_state
from jaxpar.step.model_flop import model_flop
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train import loop
from jaxpar.train.faults import SkippedBatches, Watch
from jaxpar.train.lock import Lock
from jaxpar.train.loggers.base import LoggedRun
from jaxpar.train.memory_explanation import explained_state
from jaxpar.train.metrics import Log
from jaxpar.train.noise import Noise
from jaxpar.train.progress import Progress, say_and_record, waiting
from jaxpar.train.run import Outcome
from jaxpar.train.step_trace import StepTrace
from jaxpar.train.watchdog import beat
from jaxpar.train.watchdog.decisions import SLOW
from jaxpar.train.watchdog.thread import SingleProcess, WatchdogThread, forget

SCHEDULE = "parallel.pipeline.schedule"  # a job may leave it open; then it depends on the devices


def train(job: Job, *, at: int | None = None, stream=None) -> dict[str, Any]:
    """Trains a job to its last step, or until a signal stops it; returns a summary of the run.

    Args:
      job: The job.
      at: The checkpoint step to continue from, the newest by default; newer checkpoints are set aside.
      stream: Stream for progress messages; standard output by default.

    Raises:
      JaxparError: With the problems of the job, its data, its run folder or its loss.
    """

    def say(text: str) -> None:
        print(text, file=stream or sys.stdout, flush=True)

    folder = local_folder(job.run.dir)
    bucket = Bucket(job.run.dir, say) if is_address(job.run.dir) else None
    watchdog = _connect(job, folder)
    try:
        if bucket and watchdog.count > 1:
            raise refuse(
                f"run.dir = {job.run.dir!r:.200} with {watchdog.count} processes",
                rule="several processes write one folder, each its part, and find each other there",
                fix="a bucket that is mounted on all hosts (gcsfuse, mountpoint-s3), and its folder",
            )
        watchdog.agree("job", dumps(job) + "".join(f"{name} {version}\n" for name, version in versions().items()))
        store = Store(folder / "checkpoints", job.checkpoint, on_commit=bucket.push if bucket else None)
        if bucket is None:
            check_folder(job, folder)

        with (
            Lock(folder, say_and_record(folder, say)) if watchdog.process == 0 else nullcontext(),
            bucket.synchronized() if bucket else nullcontext(),
        ):
            steps = check_folder(job, folder)
            if at is not None:
                steps = _rewind(store, steps, at, say if watchdog.process == 0 else None)
            job_changes = run_folder.compare_jobs(folder, job) if steps else []
            with waiting("reading the data, laying out the model", stream or sys.stdout):
                built = build(job, processes=watchdog.count)
            job_changes += _check_same_run(folder, built, steps)
            watchdog.agree("data", built.source.fingerprint)
            watchdog.agree("list of checkpoints", str(steps))
            make_folder(folder)
            result = _train(job, built, store, watchdog, steps, job_changes, stream)
        watchdog.close()
        return result
    except JaxparError as error:
        watchdog.close(f"failed: {error.problems[0].got}")
        raise
    except (ValueError, RuntimeError, OSError) as error:
        cause = watchdog.explain(error)
        watchdog.close(f"failed: {describe_exception(cause)}")
        if cause is error:
            raise
        raise cause from error
    finally:
        watchdog.close(
            "failed: it ended before the run did"
        )  # after any exit: otherwise the watchdog thread would keep reporting that this process is alive


def _connect(job: Job, folder: Path) -> SingleProcess:
    """Connects the processes of the run, and starts their watchdog."""
    cluster = detect(os.environ)
    if cluster is None:
        if os.environ.get("JAXPAR_ATTEMPT"):  # a single launched process must add up bitwise like several
            connect(Cluster(coordinator=os.environ["JAXPAR_COORDINATOR"], processes=1, process=0, source="launch"))
        return SingleProcess()
    make_folder(folder)
    attempt = ""
    if cluster.process == 0:
        forget(folder)
        attempt = beat.begin_attempt(folder)
    jax.config.update("jax_enable_preemption_service", False)  # it would intercept SIGTERM  # pyright: ignore
    # JAX kills processes without naming the culprit: its heartbeat must time out only after our watchdog has reported
    heartbeat = HEARTBEAT + math.ceil(job.run.timeout)
    attempt = connect(
        cluster, timeout=job.run.timeout * SLOW, heartbeat=heartbeat, word=attempt,
        check=lambda word: beat.find_attempt(folder, word, process=cluster.process),
    )  # fmt: skip
    return WatchdogThread(folder, attempt, process=cluster.process, count=cluster.processes, limit=job.run.timeout)


def _train(
    job: Job,
    built: BuiltJob,
    store: Store,
    watchdog: SingleProcess,
    steps: list[int],
    changed: list[run_folder.KeyChange],
    stream,
) -> dict[str, Any]:
    folder, is_writer = local_folder(job.run.dir), watchdog.process == 0
    if watchdog.count > 1:
        for step in built.steps:
            step.compiler.compare_programs, step.compiler.compile_context = watchdog.agree, watchdog.compiling
    devices = list(built.layout.device_mesh.devices.flat)
    progress = Progress(
        job.train.steps, every=job.metrics.show_every, unit=counted_unit(job),
        flops=step_flop(built), batch=job.train.global_batch, peak=_peak_flops(devices),
        simulated=is_simulated(devices),
        stream=stream if is_writer else io.StringIO(), events=_events(folder, steps) if is_writer else None,
    )  # fmt: skip
    store.say, store.replicas = progress.say, describe_replicas(built.layout)
    with progress:
        start, at = _restore(built, store, steps, progress, watchdog)
        run_folder.check_changes(
            changed, job, at
        )  # after `restore`, because `run.changed` cannot allow mismatches of arrays
        lost_notes = lost_files(folder) if steps else []
        if is_writer:  # a single writer
            run_folder.save_job(folder, job)
            write_json(folder / "run.json", record(built))
        loggers = resolve_loggers(job) if is_writer else ()
        logged = _logged_run(folder, built) if loggers else None
        log = Log(folder, start=at, writes=is_writer, loggers=loggers, run=logged, say=progress.say)
        newest = log.recent[-1] if log.recent else {}
        for text in [*_facts(job, built, at), *lost_notes, *_resume_notes(job, built, changed, newest, at)]:
            progress.say(text)
        run = _loop(built, store, log, progress, watchdog)
        try:
            outcome = loop.run(run, start)
        finally:
            store.close()
            log.close()
        if job.sweep.over and is_writer:
            progress.say("\n".join(sweep.summarize(folder, job.sweep)))
        if is_writer:
            write_json(folder / "run.json", record(built) | {"peak": peak_memory(built.step, devices)})
        for text in _final_notes(job, built, outcome, run):
            progress.say(text)
    return {
        "run": str(folder),
        "step": int(outcome.state.step),
        "stopped_by": outcome.stopped_by,
        "resumed_from": at,
        "last": outcome.last,
        "suggested_batch": run.noise.suggest_batch(_count_batch_parts(job, built)),
    }


def _restore(
    built: BuiltJob, store: Store, steps: list[int], progress: Progress, watchdog: SingleProcess
) -> tuple[State, int]:
    """Returns the state of the latest checkpoint, or a first one, and its step."""
    progress.show_activity("restoring the state" if steps else "making the state")
    watchdog.begin_activity(0, "restoring" if steps else "starting")
    with explained_state(built.layout, built.optimizer, offload=built.job.train.offload):
        start, at = store.restore(built.step.abstract()) if steps else (_first_state(built, progress), 0)
        jax.block_until_ready(start.step)  # XLA may report with the arrays that it could not allocate them
    progress.resume(at)
    return start, at


def _facts(job: Job, built: BuiltJob, at: int) -> list[str]:
    """Returns one text on the layout, the devices and the folder of the run."""
    batch = job.train.global_batch
    rate, phases = job.optimizer.describe_rate(batch), job.train.growth.describe(batch)
    facts = [built.layout.summary(), *built.layout.notes, *filter(None, [rate, phases, _noise_note(built)])]
    facts += getattr(built.source, "notes", ())
    facts.append(f"{describe(list(built.layout.device_mesh.devices.flat))}, {local_folder(job.run.dir)}")
    return ["\n".join(facts) + (f", on from step {at}" if at else "")]


def _resume_notes(
    job: Job, built: BuiltJob, changed: list[run_folder.KeyChange], newest: dict[str, Any], at: int
) -> list[str]:
    notes = [f"changed since step {at}: {change}" for change in changed]
    notes += filter(None, [rate_jump(built, newest, at)])
    if at >= job.train.steps:
        notes.append(f"nothing to do: trained to step {at} of {job.train.steps}; raise train.steps to go on")
    return notes


def _final_notes(job: Job, built: BuiltJob, outcome: Outcome, run: loop.Run) -> list[str]:
    """Returns the notes that are complete once the step was traced and the run has ended."""
    notes = [*built.step.layout.notes[len(built.layout.notes) :], *built.step.gradients.notes]
    if (matmuls := built.step.compiler.matmuls) is not None:
        notes.append("\n".join([str(matmuls), *matmuls.notes]))
    if outcome.stopped_by:
        end = int(outcome.state.step)
        notes.append(f"stopped by {outcome.stopped_by}, saved step {end}; the same command goes on from there")
    size = job.train.global_batch * job.train.growth.factor(job.train.steps - 1)
    return [*notes, *filter(None, [run.noise.describe(size, _count_batch_parts(job, built))])]


def _count_batch_parts(job: Job, built: BuiltJob) -> int:
    """Returns the number of parts of a batch that are computed apart."""
    return built.layout.replicas * job.train.accumulate


def _logged_run(folder: Path, built: BuiltJob) -> LoggedRun:
    facts = {f"versions.{name}": number for name, number in versions().items()}
    facts["devices"] = describe(list(built.layout.device_mesh.devices.flat))
    facts["report"] = str(folder.resolve() / "report.html")
    texts = {"job": dumps(built.job), "layout": built.layout.explain()}
    return LoggedRun(folder=folder, config=run_folder.key_values(built.job) | facts, texts=texts)


def _noise_note(built: BuiltJob) -> str:
    """Explains why a requested noise temperature cannot be written; "" if it can be, or is not requested."""
    if not built.job.metrics.noise_every or built.source.examples is not None:
        return ""
    source = built.job.data.source
    return f"noise_temperature is not written: data.source = {source!r} has no `examples`, the number to train on"


def _events(folder: Path, steps: list[int]) -> Path:
    """Returns the events file of a run; deletes an old one if the run starts anew."""
    file = folder / "events.jsonl"
    if not steps:
        file.unlink(missing_ok=True)
    return file


def _first_state(built: BuiltJob, progress: Progress) -> State:
    """Creates the state of a new run; its parameters come from `checkpoint.start_from` if that is set."""
    if built.layout.blueprint.copies:
        from jaxpar.job.parts.preference import begin_reference  # other jobs do not load it

        return begin_reference(built.layout, _policy_state(built, progress))
    return _policy_state(built, progress)


def _policy_state(built: BuiltJob, progress: Progress) -> State:
    train, spec = built.job.train, built.job.checkpoint
    if is_folder(spec.start_from):
        first_state, message = run_weights.start_run(built)
        progress.say(message)
        return first_state
    first_state = init_state(built.layout, built.optimizer, seed=train.seed, offload=train.offload)
    if spec.start_from:
        first_state, origin = start_from.start(spec, first_state, built.layout, built.optimizer)
        progress.say(str(origin))
    return first_state


def step_flop(built: BuiltJob) -> float:
    """Returns the model's FLOP per step; 0 on simulated or unknown devices, which show no MFU."""
    if not _peak_flops(list(built.layout.device_mesh.devices.flat)):
        return 0.0
    return model_flop(built.step, abstract_batch(built.job))


def record(built: BuiltJob) -> dict[str, Any]:
    """Returns the contents of RUN/run.json: machine, software, layout and data of a run."""
    return where() | {
        "devices": describe(list(built.layout.device_mesh.devices.flat)),
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


def _candidate(built: BuiltJob) -> dict[str, Any]:
    """Returns the layout as a planner candidate, {} if the planner cannot model it."""
    try:
        return asdict(layout_candidate(built.job, built.layout))
    except JaxparError:
        return {}


def peak_memory(step: Step, devices: list[Any]) -> dict[str, Any]:
    """Returns the peak bytes per device: by XLA's compiler, and measured on the local devices (None if unknown)."""
    host_devices = [device for device in devices if device.process_index == jax.process_index()]
    readings = [stats for device in host_devices if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats]
    measured = max([stats["peak_bytes_in_use"] for stats in readings], default=None)
    return {"compiled": step.memory_bytes, "measured": measured}


def _loop(built: BuiltJob, store: Store, log: Log, progress: Progress, watchdog: SingleProcess) -> loop.Run:
    job, train = built.job, built.job.train
    folder = local_folder(job.run.dir)
    skipped = SkippedBatches(folder, fresh=not store.steps())
    noise = Noise(job.metrics.noise_every, momentum=job.optimizer.momentum, examples=built.source.examples)
    noise.resume(log.measured)
    span = job.checkpoint.every * (job.checkpoint.keep_last + job.checkpoint.keep_best)  # of a rollback
    return loop.Run(
        step=built.step, source=built.source, steps=train.steps, global_batch=train.global_batch,
        eval_every=train.eval_every, eval_batches=train.eval_batches, checkpoints=job.checkpoint,
        ahead=job.data.ahead, sets=built.sets, store=store, log=log, progress=progress,
        learning_rate=built.learning_rate, watchdog=watchdog,
        watch=Watch(job.faults, log.recent, span=span, skipped=log.skipped), good=batch_spec(job), skipped=skipped,
        trace=StepTrace(folder if watchdog.process == 0 else None, train.profile, progress.say),
        noise=noise, growth=train.growth, best=best_evaluation(job), derived=derived_metrics(job),
        larger=built.later_steps,
    )  # fmt: skip


def _rewind(store: Store, steps: list[int], at: int, say: Callable[[str], None] | None) -> list[int]:
    """Returns the checkpoint steps up to `at`. The process that passes `say` also renames all later checkpoints."""
    if at not in steps:
        raise refuse(
            f"no checkpoint of step {at} in {store.folder}",
            rule="a run goes on from a checkpoint",
            fix=f"--from {steps[-1]}; there are {', '.join(map(str, steps[-8:]))}"
            if steps
            else "train it first: jaxpar train JOB",
        )
    if say and (folders := store.set_aside_after(at)):
        say(f"on from step {at}: later checkpoints are renamed to {', '.join(folders)}")
    return [step for step in steps if step <= at]


def _check_same_run(folder: Path, built: BuiltJob, steps: list[int]) -> list[run_folder.KeyChange]:
    """Refuses to continue on other data; returns a note if other devices imply another pipeline schedule."""
    recorded = check_same_data(folder, built.source.fingerprint) if steps else {}
    old, new = recorded.get("schedule"), _schedule(built)
    is_open = built.job.parallel.pipeline.schedule == UNNAMED
    return [run_folder.KeyChange(SCHEDULE, old, new)] if is_open and old and new and old != new else []


def _schedule(built: BuiltJob) -> str:
    """Returns the name of the pipeline schedule, "" without a pipeline."""
    layout = built.layout
    return layout.parallel.pipeline.schedule if layout.sizes["pipe"] > 1 else ""


def _peak_flops(devices: list[Any]) -> float:
    if not devices or is_simulated(devices):
        return 0.0
    chip = find_chip(devices[0].device_kind)
    return chip.bf16_flops * len(devices) if chip else 0.0
