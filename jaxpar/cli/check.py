"""`jaxpar check JOB`: reports all problems of a job at once, before anything is compiled, on any machine.

It also checks the run folder: that it can be written, that `checkpoint.start_from` exists, and that an existing run may
be resumed with this job. It builds no step, packs no text and uses no device of the job: problems that only these
reveal are reported by `train`.

`--explain` also compiles the step for the devices that the job simulates or names: only the compiled program shows
whether devices duplicate each other's work.
"""

import argparse
from functools import reduce
from typing import TYPE_CHECKING, Any

from jaxpar.cli.options import add_job

if TYPE_CHECKING:
    from jaxpar.errors import Problem
    from jaxpar.job.file.schema import Job
    from jaxpar.parallel.layout import Layout

EXAMPLE = """\
  $ jaxpar check configs/quickstart.toml
  ok: Decoder on data 2 x fsdp 2 x tensor 2, ZeRO-3: ...
  $ jaxpar check configs/quickstart.toml --explain
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "check",
        help="report every problem of a job",
        description="Report all problems of a job at once, before anything is compiled; needs no GPU.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.add_argument(
        "--explain",
        action="store_true",
        help="show how every parameter is sharded, and why; compile the step, and "
        "show whether a device computes more than its share",
    )
    verb.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> tuple[Any, int]:
    """Checks a job, prints its layout and notes, and returns them.

    Raises:
      JaxparError: If the job has problems; it lists all of them.
    """
    from jaxpar.errors import JaxparError
    from jaxpar.job.file.parse import load_with_problems

    job, problems = load_with_problems(args.job, args.overrides, allow_import=args.allow_import)
    if job is None:
        raise JaxparError(*problems)

    from jaxpar.job.checkpoint import check_run

    layout = _layout(args, job, problems)
    if problems := check_run(job, layout):
        raise JaxparError(*problems)
    phases = job.train.growth.describe(job.train.global_batch)
    details = layout.details if args.explain else ()
    print(f"ok: {layout.summary()}", *layout.notes, *details, *_messages(job, layout), sep="\n")
    placed, other_state = (
        {path: layout.describe(path) for path in places} for places in (layout.placements, layout.other_state)
    )
    result = {
        "problems": [], "summary": layout.summary(), "notes": [*layout.notes], "parameters": placed,
        "other_state": other_state, "phases": phases,
    }  # fmt: skip
    schedule_note = ""
    if layout.sizes["pipe"] > 1:
        again = job.train.remat == "full" or job.parallel.pipeline.keep == "inputs"
        result["schedule"], schedule_note = _schedule(layout, again=again)
    if args.explain:
        from jaxpar.job.inspect import matmul_summary

        result["work"] = matmul_summary(job)
        note = [schedule_note, "\n"] if schedule_note else []
        print(*note, layout.explain().partition("\n\n")[2], "\n\n", result["work"], sep="")
    return result, 0


def _layout(args: argparse.Namespace, job: "Job", problems: "list[Problem]") -> "Layout":
    """Returns the layout of a job, with notes on its logits.

    Raises:
      JaxparError: If there are `problems`, or more that the layout shows.
    """
    from jaxpar.errors import JaxparError
    from jaxpar.job.check import resolve
    from jaxpar.job.parts.names import vocabulary
    from jaxpar.mesh.devices import simulate, use_cpu_only
    from jaxpar.models.islands import use_islands
    from jaxpar.models.settings.computing import record_logits
    from jaxpar.parallel.layout import with_logits, with_note

    if args.explain and job.mesh.simulate:
        simulate(job.mesh.simulate)
    elif job.mesh.names_devices:
        use_cpu_only()
    if any(problem.got.startswith(("parallel.", "mesh.")) for problem in problems):
        raise JaxparError(*problems)  # the axis sizes are unknown
    with record_logits() as logits, use_islands({}) as called:
        resolved = resolve(job, as_written=not problems)
        problems = [*problems, *(resolved.problems or vocabulary(job))]
    if problems or resolved.layout is None:
        raise JaxparError(*problems)
    layout = resolved.layout
    if layout.sizes["pipe"] > 1:
        logits = logits[-1:]  # one microbatch in the pipeline; earlier entries are from the trace without a pipeline
    else:
        logits = [each.part(job.train.accumulate) for each in logits]
    auto = sorted(each for each in called if each.startswith("context by auto"))
    return reduce(with_note, auto, reduce(with_logits, logits, layout))


def _messages(job: "Job", layout: "Layout") -> list[str]:
    from jaxpar.data.sources import report_lengths
    from jaxpar.job.parts.names import describe_pictures
    from jaxpar.parallel.layout import sync_note

    batch = job.train.global_batch
    messages = [sync_note(layout), job.optimizer.describe_rate(batch), report_lengths(job.data), describe_pictures(job)]
    return [*filter(None, [*messages, job.train.growth.describe(batch)])]


def _schedule(layout: "Layout", *, again: bool) -> tuple[dict[str, Any], str]:
    """Returns the schedule's costs and a sentence on them; `again`: whether a backward recomputes its forward."""
    from jaxpar.pipeline.draw.draw_schedule import count_noun, describe_cut
    from jaxpar.pipeline.draw.notebook import row
    from jaxpar.pipeline.draw.svg import printable
    from jaxpar.pipeline.run.asynchronous import plan_versions
    from jaxpar.pipeline.run.tick_program import program
    from jaxpar.pipeline.tables.price import OpTimes, price

    schedule, keep, weights = layout.schedule, layout.parallel.pipeline.keep, layout.parallel.pipeline.weights
    versions = (
        ""
        if weights == "flush"
        else f" and {count_noun(plan_versions(program(schedule), weights).versions, 'version')} of weights"
    )
    cost = row(schedule, price(schedule, OpTimes(backward=1.0 + again)))
    ideal, barrier = (f"{cost['bubble'][run_check]:.1%}" for run_check in ("ideal", "barrier"))
    return cost, (
        f"{printable(schedule.name)}: {describe_cut(schedule)}, {count_noun(schedule.ticks, 'tick')}; "
        f"bubble {ideal} ideal, "
        f"{barrier} with a "
        f"barrier after every tick (a backward takes {2 + again} forwards); a stage keeps {keep} of at most "
        f"{cost['kept']:.3g} microbatches{versions}; {count_noun(schedule.messages, 'message')} per step"
    )
