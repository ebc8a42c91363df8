"""`jaxpar partition PROFILE LEVEL...`: assigns the layers of a profile to stages and replicas, as PipeDream does."""

import argparse
from typing import Any

from jaxpar.cli.options import add_json

EXAMPLE = """\
  $ jaxpar partition vgg16.graph.txt 16@10Gb/s
  41 layers, 527.8 MiB of parameters, 673 ms a minibatch on one device
  15-1 on 16 at 1.25 GB/s: 47.1 ms a minibatch, 1.55 x as fast as data parallel (72.9 ms); modelled
    stage  layers          replicas  computes  agrees   sends    depth  versions  memory     limited by
    0      node1..node32   15        44.2 ms   5.86 ms  20.6 ms  1      2         27.55 GiB  computes
    1      node33..node41  1         10.2 ms   -        -        0      1         496.4 MiB  computes
    limited by stage 0, which computes: 44.2 ms of 47.1 ms; NOAM 2: minibatches in flight per replica of stage 0
    2 stages: the fewest that are within 0.05 of the least, 47.1 ms; 1 would take 54.8% more
    objective: coefficient ring, overlap 0.5

  $ jaxpar partition vgg16.graph.txt 4@12GB/s 4@10Gb/s      4 servers, 10 Gb/s between them, of 4 GPUs
  $ jaxpar measure layers JOB --write own.graph.txt           a profile of a model of your own

Levels are innermost first; a bandwidth is per part, one way. Stages may have unequal numbers of replicas and
update after every minibatch: for layouts that `jaxpar train` runs, `jaxpar plan JOB`.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "partition",
        help="PipeDream's partitioner: a layer profile becomes stages with replicas",
        description="Split a layer profile into pipeline stages with replicas, by PipeDream's algorithm.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "profile", metavar="PROFILE", help="a text file in the format of PipeDream's profiler (graph.txt)"
    )
    verb.add_argument("levels", metavar="LEVEL", nargs="+", help="SIZE@BANDWIDTH: 16@10Gb/s, or 4@12GB/s 4@10Gb/s")
    verb.add_argument("--memory", metavar="BYTES", help="memory of a device: 16GiB (default: no limit)")
    verb.add_argument(
        "--minibatch",
        metavar="FACTOR",
        type=float,
        default=1.0,
        help="minibatch as a multiple of the profile's (default: 1)",
    )
    verb.add_argument(
        "--coefficient", default="ring", help="cost of synchronizing weights: ring (default), shared, released, ftpipe"
    )
    verb.add_argument(
        "--overlap",
        metavar="SHARE",
        type=float,
        default=0.5,
        help="share of the synchronization that computation hides (default: 0.5)",
    )
    verb.add_argument(
        "--margin",
        metavar="SHARE",
        type=float,
        default=0.05,
        help="least gain for which more stages are used (default: 0.05)",
    )
    add_json(verb)
    verb.set_defaults(run=run_partition)


def run_partition(args: argparse.Namespace) -> tuple[Any, int]:
    """Partitions the layers of a profile and prints the stages."""
    from math import inf

    from jaxpar.partition.chain import linearise
    from jaxpar.partition.objective import Objective
    from jaxpar.partition.partitioner import partition
    from jaxpar.partition.profile import load
    from jaxpar.partition.topology import parse
    from jaxpar.units import parse_bytes, show_bytes, show_seconds

    topology = parse(args.levels)
    objective = Objective(
        coefficient=args.coefficient,
        overlap=args.overlap,
        margin=args.margin,
        memory=parse_bytes(args.memory) if args.memory else inf,
    )
    profile = load(args.profile)
    chain = linearise(profile).scale_batch(args.minibatch)
    result = partition(chain, topology, objective)
    print(
        f"{len(chain.names)} layers, {show_bytes(sum(chain.parameters))} of parameters, "
        f"{show_seconds(sum(chain.seconds))} a minibatch on one device"
    )
    for node in profile.nodes:
        if node.layer.startswith("Input") and ":" in node.layer:
            print(node.layer)
    print(result)
    return result.to_dict(), 0
