"""`jaxpar measure NAME`: measures this machine's GPUs and links, or the layers of a job's model."""

import argparse
from typing import Any

from jaxpar.cli.options import add_job, add_json, check_file

EXAMPLE = """\
  $ jaxpar measure gemm --write mine.toml
  share of its peak that this machine's GPU reaches in bf16 matmuls, for `jaxpar plan JOB --chip mine.toml`
  $ jaxpar measure links --write mine.toml
  latency and bandwidth that collectives reach between this machine's GPUs; started on several, between machines too
  $ jaxpar measure layers configs/digits.toml --write digits.graph.txt
  forward and backward time, activations, parameters, storage, work and depth of each layer of a job's model, on one
  device of this machine, for a minibatch of train.global_batch examples; the file is a profile for `jaxpar partition`
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "measure",
        help="measure this machine for the planner, or the layers of a job's model",
        description="Measure this machine's GPUs and links for the planner, or the layers of a job's model.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = verb.add_subparsers(dest="name", metavar="gemm|links|layers", required=True)
    for name, meaning, function in (
        ("gemm", "the share of its peak that a GPU reaches in bf16 matmuls", gemm),
        ("links", "latency and bandwidth that collectives reach between GPUs", links),
    ):
        parser = names.add_parser(name, help=meaning, description=meaning)
        parser.set_defaults(run=function)
        parser.add_argument("--write", default="", metavar="FILE.toml", help="the chip file to fill in")
        parser.add_argument("--rounds", type=int, default=20, help="repetitions per size (default 20)")
        if name == "links":
            parser.add_argument("--per-node", type=int, default=0, help="GPUs per machine (default: per process)")
        add_json(parser)
    meaning = "time, activations and parameters of each layer of a job's model"
    parser = names.add_parser("layers", help=meaning, description=meaning)
    parser.set_defaults(run=layers)
    add_job(parser)
    parser.add_argument("--write", metavar="FILE", help="write the profile in the format of PipeDream's profiler")


def gemm(args: argparse.Namespace) -> tuple[Any, int]:
    """Times bf16 matmuls on a GPU."""
    from jaxpar.measure.machine import gemm

    return _with_status(gemm(write=args.write, rounds=_rounds(args)))


def links(args: argparse.Namespace) -> tuple[Any, int]:
    """Times collectives between GPUs."""
    from jaxpar.measure.machine import links

    return _with_status(links(write=args.write, per_node=args.per_node, rounds=_rounds(args)))


def layers(args: argparse.Namespace) -> tuple[Any, int]:
    """Times the layers of a job's model."""
    from jaxpar.job.file.parse import load
    from jaxpar.job.partition import measure_layers

    check_file("--write", args.write, "own.graph.txt", must_be_new=True)
    return measure_layers(load(args.job, args.overrides, allow_import=args.allow_import), args.write), 0


def _with_status(result: dict[str, Any]) -> tuple[Any, int]:
    return result, 0 if result["holds"] else 1


def _rounds(args: argparse.Namespace) -> int:
    from jaxpar.errors import refuse

    if args.rounds < 1:
        raise refuse(f"--rounds {args.rounds}", rule="a count is at least 1", fix="--rounds 20")
    return args.rounds
