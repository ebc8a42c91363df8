"""`jaxpar train JOB`: trains a job, or resumes its run from the newest checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_allow_import, add_json, job_file, prefer_huge_pages, simulates_devices

EXAMPLE = """\
  $ jaxpar train configs/quickstart.toml
  $ jaxpar train configs/quickstart.toml parallel.data=1 parallel.fsdp=8 parallel.tensor=1 run.dir=runs/fsdp8
  $ jaxpar train configs/quickstart.toml --from 100
  $ jaxpar train --print-defaults

Ctrl-C, SIGTERM, a terminal that closes (SIGHUP) or a queue's warning (SIGUSR1, SIGUSR2, SIGXCPU) finish the step, save
it, evaluate nothing and end with status 130, 143, 129, 138, 140 or 152 (128 and the signal's number); the same command
resumes from there. A second Ctrl-C ends at once, without a save.
If the reader goes away (| head, a terminal under nohup), the run continues with its output in RUN/output.log.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "train",
        help="train a job",
        description="Train a job, or resume its run from the newest checkpoint.",
        epilog=EXAMPLE,
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
