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
  $ jaxpar bench gemm --write mine.toml
  which share of its peak this machine's GPU reaches in bf16 products, for `jaxpar plan JOB --chip mine.toml`
  $ jaxpar bench links --write mine.toml
  latency and bandwidth that collectives reach between this machine's GPUs; started on several, between machines too
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "bench",
        help="measure jaxpar itself, or this machine for the planner",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("name", choices=list(BENCHES), help="what to measure")
    verb.add_argument(
        "--rounds",
        type=int,
        help="interleaved pairs per layout of overhead (default 60), of links and gemm (default 20)",
    )
    verb.add_argument("--timeout", type=float, default=30.0, help="run.timeout of faults, in seconds (default 30)")
    verb.add_argument("--write", default="", metavar="FILE.toml", help="the chip's file that links and gemm fill in")
    verb.add_argument("--per-node", type=int, default=0, help="GPUs of a machine for links (default: of a process)")
    add_json(verb)
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the table; the status says whether the bounds held."""
    from jaxpar.errors import refuse

    if args.write and args.name not in MEASURED:
        raise refuse(f"bench {args.name} --write", rule="links and gemm fill in a chip's file", fix="--json FILE")
    if args.rounds is not None and args.rounds < 1:
        raise refuse(f"--rounds {args.rounds}", rule="at least one", fix="--rounds 20")
    if args.name not in (*MEASURED, "planner"):
        prefer_huge_pages()
    result = BENCHES[args.name](args)
    return result, 0 if result["holds"] else 1


def _overhead(args: argparse.Namespace) -> dict[str, Any]:
    from jaxpar.bench.overhead import overhead

    return overhead(rounds=args.rounds or 60)


def _pipeline(args: argparse.Namespace) -> dict[str, Any]:
    from jaxpar.bench.pipeline import pipeline

    return pipeline()


def _faults(args: argparse.Namespace) -> dict[str, Any]:
    from jaxpar.bench.faults import faults

    return faults(timeout=args.timeout)


def _planner(args: argparse.Namespace) -> dict[str, Any]:
    from jaxpar.bench.planner import planner

    return planner()


def _links(args: argparse.Namespace) -> dict[str, Any]:
    from jaxpar.bench.links import links

    return links(write=args.write, per_node=args.per_node, rounds=args.rounds or 20)


def _gemm(args: argparse.Namespace) -> dict[str, Any]:
    from jaxpar.bench.gemm import gemm

    return gemm(write=args.write, rounds=args.rounds or 20)


BENCHES = {
    "overhead": _overhead, "pipeline": _pipeline, "faults": _faults, "planner": _planner, "links": _links,
    "gemm": _gemm,
}  # fmt: skip
MEASURED = ("links", "gemm")  # on the devices that are there, never on simulated ones
