"""Verbs that train: one job, the members of its sweep, or several processes of one job.

jaxpar train JOB                trains a job, or resumes its run from the newest checkpoint
jaxpar sweep JOB                trains the members of a job's `[sweep]`, and prints the best
jaxpar launch -n 4 train JOB    starts, watches and restarts several processes of one job
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_allow_import, add_job, add_json, job_file, prefer_huge_pages, simulates_devices

TRAIN_EXAMPLE = """\
  $ jaxpar train configs/quickstart.toml
  $ jaxpar train configs/quickstart.toml parallel.data=1 parallel.fsdp=8 parallel.tensor=1 run.dir=runs/fsdp8
  $ jaxpar train configs/quickstart.toml --from 100
  $ jaxpar train --print-defaults

Ctrl-C, SIGTERM, a terminal that closes (SIGHUP) or a queue's warning (SIGUSR1, SIGUSR2, SIGXCPU) finish the step, save
it, evaluate nothing and end with status 130, 143, 129, 138, 140 or 152 (128 and the signal's number); the same command
resumes from there. A second Ctrl-C ends at once, without a save.
If the reader goes away (| head, a terminal under nohup), the run continues with its output in RUN/output.log.
"""
SWEEP_EXAMPLE = """\
  $ jaxpar sweep configs/digits.toml 'sweep.over.optimizer.learning_rate=[5e-4, 1e-3, 2e-3, 4e-3]' train.steps=100
  ...
  member  optimizer.learning_rate  eval loss    loss
       0                   0.0005     0.4509  0.5689
       1                    0.001     0.2808  0.3511
       2                    0.002     0.1904  0.2160
       3                    0.004     0.1295  0.1162
  best member: 3, eval loss 0.1295, optimizer.learning_rate = 0.004

[sweep] is of five kinds: a grid; random draws; population based training (pbt), in which the worst members copy the
best every so many steps, and RUN/lineage.jsonl has who copied whom; or, in rounds that restart training, evolution (a
genetic algorithm) and swarm (particle swarm optimization). All members are one compiled program, and each sees all
examples: parallel.data divides their number. `jaxpar train JOB` does the same.
"""
LAUNCH_EXAMPLE = """\
  $ jaxpar launch -n 4 train configs/quickstart.toml
  $ jaxpar launch -n 8 --nodes 2 --node 1 --coordinator 10.0.0.1:7777 train job.toml
  the second of two machines, with eight processes each

Processes started by SLURM, torchrun, Open MPI or as a Kubernetes indexed job find each other without this verb.
"""


def add_train(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "train",
        help="train a job",
        description="Train a job, or resume its run from the newest checkpoint.",
        epilog=TRAIN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "job", metavar="JOB", type=job_file, nargs="?", help="a TOML file (default: job.toml of this folder)"
    )
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    verb.add_argument(
        "--print-defaults", action="store_true", help="show every key of a job with its meaning, and exit"
    )
    verb.add_argument(
        "--from",
        dest="at",
        metavar="STEP",
        type=int,
        help="resume from the checkpoint of this step; newer ones are set aside (default: the newest good one)",
    )
    add_allow_import(verb)
    add_json(verb)
    verb.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains the job and returns the result."""
    if not args.print_defaults and Path("job.toml").is_file():
        if args.job is not None and "=" in args.job and not Path(args.job).exists():
            args.overrides, args.job = [args.job, *args.overrides], None
        args.job = args.job or "job.toml"
    if args.job is not None and simulates_devices(args.job, args.overrides):
        prefer_huge_pages()

    if sys.stdout.isatty() and not args.print_defaults:
        print("starting", end="\r", flush=True)  # the imports take seconds; the next line overwrites this

    from jaxpar.errors import STOPPED, refuse
    from jaxpar.job.file.dump import show_defaults
    from jaxpar.job.file.parse import load

    if args.print_defaults:
        from jaxpar.models.settings.reference_models import MODELS

        print(show_defaults(MODELS))
        return {}, 0
    if args.job is None:
        raise refuse(
            "jaxpar train without a job, in a folder without a job.toml",
            rule="a job is a TOML file",
            fix="jaxpar train configs/quickstart.toml, or jaxpar new mine && cd mine && jaxpar train",
        )
    job = load(args.job, args.overrides, allow_import=args.allow_import)

    from jaxpar.buckets import local_folder
    from jaxpar.cli.output import redirect_on_failure
    from jaxpar.job.run import train

    redirect_on_failure(local_folder(job.run.dir))
    result = train(job, at=args.at, stream=sys.stdout)
    return result, STOPPED.get(result["stopped_by"], 0)


def add_sweep(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "sweep",
        help="train a job with several settings of its optimizer at once",
        description="Train a job with several optimizer settings at once, and print the best.",
        epilog=SWEEP_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.set_defaults(run=run_sweep)


def run_sweep(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains the members and returns the result."""
    from jaxpar.errors import STOPPED, refuse
    from jaxpar.job.file.parse import load

    job = load(args.job, args.overrides, allow_import=args.allow_import)
    if not job.sweep.over:
        raise refuse(
            f"jaxpar sweep {args.job}, a job without [sweep.over]",
            rule="a sweep is over settings of the optimizer",
            fix="sweep.over.optimizer.learning_rate=[1e-3,3e-3], or jaxpar train",
        )
    if simulates_devices(args.job, args.overrides):
        prefer_huge_pages()

    from jaxpar.buckets import local_folder
    from jaxpar.cli.output import redirect_on_failure
    from jaxpar.job.run import train

    redirect_on_failure(local_folder(job.run.dir))
    result = train(job, stream=sys.stdout)
    return result, STOPPED.get(result["stopped_by"], 0)


def add_launch(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "launch",
        help="train a job in several processes",
        description="Train a job in several processes; if one fails, restart from the newest checkpoint.",
        epilog=LAUNCH_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("-n", "--processes", type=int, required=True, help="processes on this machine")
    verb.add_argument("--restarts", type=int, default=3, help="attempts without a new checkpoint (default 3)")
    verb.add_argument(
        "--nodes", type=int, default=1, help="number of machines, with equally many processes; all share run.dir"
    )
    verb.add_argument("--node", type=int, default=0, help="index of this machine, from 0")
    verb.add_argument(
        "--coordinator", default="", metavar="HOST:PORT", help="address of process 0; required with --nodes"
    )
    add_allow_import(verb)
    add_json(verb)
    verb.add_argument("command", choices=["train"], help="the verb that each process runs")
    verb.add_argument("job", metavar="JOB", type=job_file, help="a TOML file")
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    verb.set_defaults(run=run_launch)


def run_launch(args: argparse.Namespace) -> tuple[Any, int]:
    """Starts the processes and waits for them."""
    from jaxpar.buckets import local_folder
    from jaxpar.checkpoint import listing
    from jaxpar.cli.output import redirect_on_failure
    from jaxpar.job.file.parse import load
    from jaxpar.job.shrink import fit_processes
    from jaxpar.supervisor import Launch, supervise
    from jaxpar.train.watchdog.thread import report

    allowed = args.allow_import
    folder = local_folder(
        load(args.job, args.overrides, allow_import=allowed).run.dir
    )  # errors are printed once, before processes start
    redirect_on_failure(folder)
    launch = Launch(
        command=[args.command, args.job, *args.overrides], options=["--allow-import"] * allowed,
        processes=args.processes, restarts=args.restarts,
        nodes=args.nodes, node=args.node, coordinator=args.coordinator,
        on_failure=lambda ended: report(folder, ended.process, ended.pid, ended.how),
        shrink=lambda command, count: fit_processes(
            load(command[1], command[2:], allow_import=allowed), processes=count, most=count - 1
        ),
    )  # fmt: skip

    def progress() -> int:
        step = listing.newest(folder / "checkpoints")
        return -1 if step is None else step

    result = supervise(
        launch, progress=progress, log=lambda line: print(f"launch: {line}", file=sys.stderr, flush=True)
    )
    return result, result["status"]
