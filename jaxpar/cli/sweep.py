"""`jaxpar sweep JOB`: trains the members of a job's `[sweep]`, and prints the best one."""

import argparse
import sys
from typing import Any

from jaxpar.cli.options import add_job, prefer_huge_pages, simulates_devices

EXAMPLE = """\
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


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "sweep",
        help="train a job with several settings of its optimizer at once",
        description="Train a job with several optimizer settings at once, and print the best.",
        epilog=EXAMPLE,
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
