"""`jaxpar doctor [JOB]`: finds problems that would stop or slow a run on this machine, with a fix for each."""

import argparse
import dataclasses
from typing import Any

from jaxpar.cli.options import add_json, job_file

EXAMPLE = """\
  $ jaxpar doctor
  $ jaxpar doctor configs/quickstart.toml run.dir=/scratch/mine
  $ srun jaxpar doctor job.toml      on all machines at once: do they find each other, do their
                                     clocks agree, do they share the run folder

Exits with status 1 if there is a problem; warnings do not count. Takes less than 15 seconds, even if a driver hangs.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "doctor",
        help="look for what would stop or slow a run on this machine",
        description="Examine this machine, and a job if one is given, for problems that would stop or slow a run.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "job",
        metavar="JOB",
        type=job_file,
        nargs="?",
        default="",
        help="a TOML file; without one, only the machine is examined",
    )
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    add_json(verb)
    verb.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line per check; the exit status is 1 if there is a problem."""
    import os

    from jaxpar.job.doctor.examine import examine

    findings = examine(args.job, args.overrides, environment=os.environ)
    print("\n".join(map(str, findings)))
    count = {state: sum(finding.state == state for finding in findings) for state in ("ok", "warning", "problem")}
    print(f"{count['ok']} ok, {count['warning']} warnings, {count['problem']} problems")
    return {"findings": [dataclasses.asdict(finding) for finding in findings], **count}, int(count["problem"] > 0)
