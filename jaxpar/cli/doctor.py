"""`jaxpar doctor [JOB]`: what is wrong with this machine, and what to do."""

import argparse
import dataclasses
from typing import Any

from jaxpar.cli.options import add_json, job_file

EXAMPLE = """\
  $ jaxpar doctor
  $ jaxpar doctor configs/quickstart.toml run.dir=/scratch/mine
  $ srun jaxpar doctor job.toml      on all machines at once: do they find each other, do their
                                     clocks agree, do they share the run folder

Ends with status 1 if there is a problem; a warning is none. Takes less than 15 seconds, also where a driver hangs.
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "doctor",
        help="look for what would stop or slow a run on this machine",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "job", metavar="JOB", type=job_file, nargs="?", default="", help="a TOML file; without one, the machine alone"
    )
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    add_json(verb)
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line for each check; the status says whether there is a problem."""
    import os

    from jaxpar.job.doctor.examine import examine

    found = examine(args.job, args.overrides, environment=os.environ)
    print("\n".join(map(str, found)))
    count = {state: sum(each.state == state for each in found) for state in ("ok", "warning", "problem")}
    print(f"{count['ok']} ok, {count['warning']} to know of, {count['problem']} to mend")
    return {"findings": [dataclasses.asdict(each) for each in found], **count}, int(count["problem"] > 0)
