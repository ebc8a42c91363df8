"""`jaxpar inspect JOB`: what XLA makes of a job, for GPUs that need not be there."""

import argparse
from typing import Any

from jaxpar.cli.options import add_job, check_file

EXAMPLE = """\
  $ jaxpar inspect configs/gpu_llama_8b_fsdp8.toml
  $ jaxpar inspect configs/quickstart.toml --target h100:1x8 --html report.html
  $ jaxpar inspect configs/zero3_fsdp8.toml --target h100 --compare configs/zero2_fsdp8.toml

Ends with status 1 if the job does not fit.
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "inspect",
        help="compile a job for GPUs that need not be there: memory, collectives, time",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.add_argument("--target", metavar="CHIP:NODESxGPUS", default="", help="h100:16x8, h200:1x8, a100:..., or cpu")
    verb.add_argument("--html", metavar="FILE", help="also write a page, one file that needs nothing else")
    verb.add_argument("--compare", metavar="OTHER", help="another job, for the same target, side by side")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the report."""
    from jaxpar.inspector.compare import compare
    from jaxpar.job.file.parse import load
    from jaxpar.job.inspect import inspect

    check_file("--html", args.html, "report.html")
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    other = load(args.compare, allow_import=args.allow_import) if args.compare else None
    report = inspect(job, args.target)
    print(report)
    result, fits = report.to_dict(), report.fits is not False
    if other is not None:
        against = inspect(other, args.target)
        print(compare(report, against))
        result, fits = {"job": result, "other": against.to_dict()}, fits and against.fits is not False
    if args.html:
        report.html(args.html)
        print(f"page: {args.html}")
    return result, 0 if fits else 1
