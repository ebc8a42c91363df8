"""`jaxpar partition PROFILE|JOB LEVEL...`: assigns layers to stages and replicas, as PipeDream does."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.cli.options import add_allow_import, add_json, check_file, job_file
from jaxpar.errors import refuse
from jaxpar.mesh.chips import CHIPS, suggest_chip
from jaxpar.units import parse_bytes, show_bytes, show_seconds

if TYPE_CHECKING:
    from jaxpar.partition.chain import Chain
    from jaxpar.partition.objective import Objective, Topology

EXAMPLE = """\
  $ jaxpar partition configs/files/pipedream/vgg16.graph.txt 16@10Gb/s
  41 layers, 527.8 MiB of parameters, 673 ms a minibatch on one device
  15-1 on 16 at 1.25 GB/s: 47.1 ms a minibatch, 1.55 x as fast as data parallel (72.9 ms); modelled
    stage  layers          replicas  computes  all-reduces  sends    depth  versions  memory     limited by
    0      node1..node32   15        44.2 ms   5.86 ms      20.6 ms  1      2         27.55 GiB  computes
    1      node33..node41  1         10.2 ms   -            -        0      1         496.4 MiB  computes
    limited by stage 0, which computes: 44.2 ms of 47.1 ms; NOAM 2: minibatches in flight per replica of stage 0
    2 stages: the fewest within 5.0% of the fastest plan, 47.1 ms; 1 would take 54.8% more
    objective: coefficient ring, overlap 0.5

  $ jaxpar partition own.graph.txt 4@12GB/s 4@10Gb/s         4 servers, 10 Gb/s between them, of 4 GPUs
  $ jaxpar measure layers JOB --write own.graph.txt          a profile of a model of your own
  $ jaxpar partition JOB 4@10Gb/s --write cut.toml           the job with these stages, which trains

Levels are innermost first; a bandwidth is per part, one way. Of a job, the loss is traced, and a roofline of --chip
gives the seconds of its pieces: those that its model gives to `jp.pipelined`, or else what lies between equations.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "partition",
        help="PipeDream's partitioner: layers become stages with replicas, and a job that trains so",
        description="Split a layer profile, or a job's model, into stages with replicas, by PipeDream's algorithm.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "profile",
        metavar="PROFILE|JOB",
        type=job_file,
        help="a text file in the format of PipeDream's profiler (graph.txt), or a job (.toml)",
    )
    verb.add_argument("levels", metavar="LEVEL", nargs="+", help="SIZE@BANDWIDTH: 16@10Gb/s, or 4@12GB/s 4@10Gb/s")
    verb.add_argument("--write", metavar="FILE", help="of a job: the job with these stages and replicas, which trains")
    verb.add_argument(
        "--rows", metavar="N", type=int, help="of a job: examples of a minibatch (default: its global batch by devices)"
    )
    verb.add_argument("--chip", default="h100", help="of a job: the chip whose roofline gives seconds (default: h100)")
    add_allow_import(verb)
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

    from jaxpar.partition.chain import linearise, load
    from jaxpar.partition.objective import Objective, parse
    from jaxpar.partition.partitioner import partition

    topology = parse(args.levels)
    objective = Objective(
        coefficient=args.coefficient,
        overlap=args.overlap,
        margin=args.margin,
        memory=parse_bytes(args.memory) if args.memory else inf,
    )
    if Path(args.profile).suffix == ".toml":
        return _partition_job(args, topology, objective)
    if args.write or args.rows:
        raise refuse(
            f"{'--write' if args.write else '--rows'} with the profile {args.profile}",
            rule="a profile does not say which model it is of",
            fix="jaxpar partition JOB.toml, whose model is traced",
        )
    profile = load(args.profile)
    chain = linearise(profile).scale_batch(args.minibatch)
    result = partition(chain, topology, objective)
    _print_chain(chain)
    for node in profile.nodes:
        if node.layer.startswith("Input") and ":" in node.layer:
            print(node.layer)
    print(result)
    return result.to_dict(), 0


def _partition_job(args: argparse.Namespace, topology: "Topology", objective: "Objective") -> tuple[Any, int]:
    """Partitions the model of a job, and writes the job that runs the plan."""
    from dataclasses import replace
    from math import prod

    from jaxpar.job.file.dump import dumps
    from jaxpar.job.file.parse import load as load_job
    from jaxpar.job.partition import apply_stages, traced_job
    from jaxpar.mesh.devices import use_cpu_only
    from jaxpar.partition.partitioner import partition
    from jaxpar.partition.stage_costs import costs_of_chain
    from jaxpar.partition.traced_chain import FORWARDS
    from jaxpar.pipeline.tables.library import schedule

    check_file("--write", args.write, "cut.toml", must_be_new=True)
    chip = next((chip for chip in CHIPS if chip.key == args.chip), None)
    if chip is None:
        keys = [chip.key for chip in CHIPS]
        raise refuse(f"--chip {args.chip}", rule=f"one of {', '.join(keys)}", fix=suggest_chip(args.chip, keys))
    use_cpu_only()
    job = load_job(args.profile, allow_import=args.allow_import)
    rows = args.rows or max(1, job.train.global_batch // prod(size for size, _ in topology))
    pieces = traced_job(job, rows)
    chain = pieces.chain(chip).scale_batch(args.minibatch)
    result = partition(chain, topology, objective)
    _print_chain(chain)
    print(f"{rows * args.minibatch:g} examples a minibatch; seconds by a roofline of {chip.name}")
    print(result)
    replicas = tuple(stage.replicas for stage in result.stages)
    if len(replicas) > 1:
        table = replace(schedule("1f1b", stages=len(replicas), microbatches=2 * len(replicas)), replicas=replicas)
        costs = costs_of_chain(chain, [len(stage.layers) for stage in result.stages], table, forward=1 / FORWARDS)
        print(f"with {table.microbatches * table.group} microbatches, {costs}")
    if args.write:
        Path(args.write).write_text(dumps(apply_stages(job, result.stages, named=bool(pieces.pieces))))
        print(f"job: {args.write}")
    return result.to_dict(), 0


def _print_chain(chain: "Chain") -> None:
    print(
        f"{len(chain.names)} layers, {show_bytes(sum(chain.parameters))} of parameters, "
        f"{show_seconds(sum(chain.seconds))} a minibatch on one device"
    )
