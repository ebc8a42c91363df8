"""`jaxpar bench NAME`: measurements that remember where they were taken."""

import argparse
from typing import Any

from jaxpar.cli.options import add_json, prefer_huge_pages

EXAMPLE = """\
  $ jaxpar bench overhead
  the step of jaxpar beside a hand-written one in raw JAX, interleaved in one process
  $ jaxpar bench pipeline
  memory of a pipelined step by schedule and microbatches, as compiled for simulated devices and for eight H100s
  $ jaxpar bench faults --timeout 10
  seconds until all processes of a run have noticed that one is killed, stopped, late or runs another program
  $ jaxpar bench planner
  the planner's step times beside published ones: eight runs of Megatron-LM on A100s, five on H100s
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "bench", help="measure jaxpar itself", epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verb.add_argument("name", choices=["overhead", "pipeline", "faults", "planner"], help="what to measure")
    verb.add_argument("--rounds", type=int, default=60, help="interleaved pairs per layout of overhead (default 60)")
    verb.add_argument("--timeout", type=float, default=30.0, help="run.timeout of faults, in seconds (default 30)")
    add_json(verb)
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the table; the status says whether the bounds held."""
    if args.name == "planner":
        from jaxpar.bench.planner import planner

        result = planner()
        return result, 0 if result["holds"] else 1
    prefer_huge_pages()
    if args.name == "pipeline":
        from jaxpar.bench.pipeline import pipeline

        result = pipeline()
    elif args.name == "faults":
        from jaxpar.bench.faults import faults

        result = faults(timeout=args.timeout)
    else:
        from jaxpar.bench.overhead import overhead

        result = overhead(rounds=args.rounds)
    return result, 0 if result["holds"] else 1
