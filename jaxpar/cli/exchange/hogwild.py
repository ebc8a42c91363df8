"""`jaxpar exchange hogwild JOB`: trains with threads that update shared parameters without locks."""

import argparse
from typing import Any

from jaxpar.cli.options import add_job

EXAMPLE = """\
  $ jaxpar exchange hogwild sparse.toml --workers 1,2,4
"""


def add(inner) -> None:
    """Adds the verb to the subparsers of `jaxpar exchange`."""
    meaning = "train a job by Hogwild!: threads of the processor update shared parameters without locks (not simulated)"
    verb = inner.add_parser("hogwild", help=meaning, description=meaning)
    add_job(verb)
    verb.add_argument(
        "--workers", default="1,2", metavar="N,N", help="numbers of threads; one training each (default: 1,2)"
    )
    verb.set_defaults(run=run_hogwild)


def run_hogwild(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains once per number of threads and prints a row each."""
    from jaxpar.errors import refuse
    from jaxpar.job.file.parse import load

    words = args.workers.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= 1024 for word in words):
        raise refuse(f"--workers {args.workers:.60}", rule="numbers of threads, from 1 to 1,024", fix="--workers 1,2,4")
    job = load(args.job, args.overrides, allow_import=args.allow_import)

    from dataclasses import asdict

    from jaxpar.job.compare import hogwild
    from jaxpar.units import show_seconds

    rows = []
    print("threads      loss  eval loss       time  updates/s  staleness  elements written by an update", flush=True)
    for row in hogwild.train(job, [int(word) for word in words]):
        rows.append(row)
        print(
            f"{row.workers:>7}  {row.loss:>8.4f}  {row.eval_loss:>9.4f}  {show_seconds(row.seconds):>9}  "
            f"{job.train.steps / row.seconds:>9.4g}  {row.staleness:>9.3g}  {row.write_share:.3%}",
            flush=True,
        )
    return {"rows": [asdict(row) for row in rows]}, 0
