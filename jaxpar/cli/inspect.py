"""`jaxpar inspect JOB`: compiles a job for GPUs that this machine need not have."""

import argparse
from typing import Any

from jaxpar.cli.options import add_job, check_file

EXAMPLE = """\
  $ jaxpar inspect configs/gpu_llama_8b_fsdp8.toml
  $ jaxpar inspect configs/quickstart.toml --target h100:1x8 --html report.html
  $ jaxpar inspect configs/zero3_fsdp8.toml --target h100 --compare configs/zero2_fsdp8.toml

Exits with status 1 if the job does not fit.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "inspect",
        help="compile a job for GPUs that need not be there: memory, collectives, time",
        description="Compile a job for GPUs that this machine need not have, and report memory, collectives and time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.add_argument("--target", metavar="CHIP:NODESxGPUS", default="", help="h100:16x8, h200:1x8, a100:..., or cpu")
    verb.add_argument("--html", metavar="FILE", help="also write the report as one self-contained page")
    verb.add_argument("--compare", metavar="OTHER", help="another job, compiled for the same target, to compare with")
    verb.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> tuple[Any, int]:
    """Compiles the job and prints memory, collectives and time; exit status 1 if it does not fit."""
    from jaxpar.inspector.budget import compare
    from jaxpar.job.file.parse import load
    from jaxpar.job.inspect import inspect

    check_file("--html", args.html, "report.html")
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    other_job = load(args.compare, allow_import=args.allow_import) if args.compare else None
    report = inspect(job, args.target)
    print(report)
    result, fits = report.to_dict(), report.fits is not False
    if other_job is not None:
        other_report = inspect(other_job, args.target)
        print(compare(report, other_report))
        result, fits = {"job": result, "other": other_report.to_dict()}, fits and other_report.fits is not False
    if args.html:
        report.html(args.html)
        print(f"page: {args.html}")
    return result, 0 if fits else 1
