"""`jaxpar exchange compare|collective|hogwild`: compares methods of synchronization, or shows one collective.

compare JOB --methods ...    trains a job with several synchronization methods
hogwild JOB                  trains with threads that update shared parameters without locks
collective NAME              runs a collective on simulated devices and shows its messages by round
"""

import argparse
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_job, add_json, check_file

COMPARE_EXAMPLE = """\
  $ jaxpar exchange compare configs/quickstart.toml --methods sync,local:20,diloco:20,sign,topk:0.01,ssp:3
  $ jaxpar exchange compare configs/digits.toml --methods sync,async,ssp:3 --delays pareto:2 train.steps=200
"""
HOGWILD_EXAMPLE = """\
  $ jaxpar exchange hogwild sparse.toml --workers 1,2,4
"""
COLLECTIVE_EXAMPLE = """\
  $ jaxpar exchange collective ring --devices 3
  ring between 3 devices
  round 1  0 -> 1 [2:3] added, 1 -> 2 [0:1] added, 2 -> 0 [1:2] added
  round 2  0 -> 1 [1:2] added, 1 -> 2 [2:3] added, 2 -> 0 [0:1] added
  round 3  0 -> 1 [0:1], 1 -> 2 [1:2], 2 -> 0 [2:3]
  round 4  0 -> 1 [2:3], 1 -> 2 [0:1], 2 -> 0 [1:2]
  12 messages in 4 rounds; 12 elements in all, 4 by the device that sends most
  device 0  0 1 2  ->  30 33 36
  device 1  10 11 12  ->  30 33 36
  device 2  20 21 22  ->  30 33 36
"""


def _add_compare(inner) -> None:
    """Adds the verb to the subparsers of `jaxpar exchange`."""
    meaning = "train a job by several methods: loss against examples, bytes and virtual seconds, on one page"
    verb = inner.add_parser("compare", help=meaning, description=meaning)
    add_job(verb)
    verb.add_argument(
        "--methods",
        required=True,
        help="sync, an exchange (local:20, diloco:20, topk:0.01), or, simulated on a virtual clock, async, ssp:STEPS, "
        "backup:WORKERS, downpour:SHARDS, servers:COUNT, async-easgd:STEPS; with commas",
    )
    verb.add_argument(
        "--delays",
        metavar="LAW",
        default="exponential",
        help="distribution of a replica's compute time: constant, exponential (default), "
        "lognormal:SIGMA, pareto:SHAPE, or a .csv of seconds",
    )
    verb.add_argument(
        "--compute", metavar="SECONDS", type=float, default=0.1, help="mean of the compute time (default: 0.1)"
    )
    verb.add_argument(
        "--between", metavar="BYTES", default="1GB", help="bandwidth between replicas, one way: 10Gb/s (default: 1GB)"
    )
    verb.add_argument("--html", metavar="FILE", default="exchange.html", help="the page (default: exchange.html)")
    verb.set_defaults(run=run_comparison)


def run_comparison(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains the job with each method, prints a row per method and writes the page."""
    from jaxpar.exchange.clock.base import WorkerTimes, parse
    from jaxpar.job.compare import parse_methods
    from jaxpar.job.file.parse import load
    from jaxpar.mesh.chips import Link
    from jaxpar.units import parse_rate, show_seconds

    check_file("--html", args.html, "exchange.html")
    link = Link(latency=5e-6, bandwidth=parse_rate(args.between))
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    times = WorkerTimes(law=parse(args.delays), compute=args.compute, seed=job.train.seed)
    selected_methods = parse_methods.parse(args.methods, job)

    from jaxpar.job.compare import curves_page, training
    from jaxpar.mesh.devices import simulate

    if job.mesh.simulate:
        simulate(job.mesh.simulate)
    training.check_all(job, selected_methods)
    curves = []
    for method in selected_methods:
        curve = training.train(job, method, times, link)
        print(f"{method.name}: loss {curve.loss[-1]:.4f}, eval loss {curve.eval_loss:.4f}, "
              f"{show_seconds(curve.seconds[-1])} on the virtual clock", flush=True)  # fmt: skip
        curves.append(curve)
    print(f"\n{curves_page.text(curves)}")
    title = f"{Path(args.job).stem}: how {training.replicas(job)} replicas agree"
    link_note = f"{args.between} per second between them, with 5 us before the first byte"
    Path(args.html).write_text(
        curves_page.render(curves, title=title, law=args.delays, compute=args.compute, link_note=link_note)
    )
    print(f"page: {args.html}")
    return {"curves": [curve.to_dict() for curve in curves]}, 0


def _add_hogwild(inner) -> None:
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

    from jaxpar.job.compare import thread_races
    from jaxpar.units import show_seconds

    rows = []
    print("threads      loss  eval loss       time  updates/s  staleness  elements written by an update", flush=True)
    for row in thread_races.train(job, [int(word) for word in words]):
        rows.append(row)
        print(
            f"{row.workers:>7}  {row.loss:>8.4f}  {row.eval_loss:>9.4f}  {show_seconds(row.seconds):>9}  "
            f"{job.train.steps / row.seconds:>9.4g}  {row.staleness:>9.3g}  {row.write_share:.3%}",
            flush=True,
        )
    return {"rows": [asdict(row) for row in rows]}, 0


def _add_collective(inner) -> None:
    """Adds the verb to the subparsers of `jaxpar exchange`."""
    meaning = "show a collective message by message, and run it on simulated devices"
    verb = inner.add_parser("collective", help=meaning, description=meaning)
    verb.add_argument(
        "name",
        metavar="NAME",
        help="send, broadcast, reduce, gather, scatter, all_gather, reduce_scatter, all_to_all, or an all-reduce: "
        "ring, halving, butterfly, tree, two_levels",
    )
    verb.add_argument("--devices", metavar="N", type=int, default=4, help="number of devices (default: 4)")
    add_json(verb)
    verb.set_defaults(run=run_collective)


def run_collective(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the messages of a collective, and the array of each device before and after."""
    from jaxpar.errors import refuse

    if not 1 <= args.devices <= 64:
        raise refuse(f"--devices {args.devices}", rule="1 to 64 devices are simulated", fix="--devices 4")

    import jax

    from jaxpar.exchange.collectives.programs import check, show
    from jaxpar.mesh.devices import simulate

    check(args.name)
    simulate(args.devices)
    transcript = show(args.name, jax.devices()[: args.devices])
    print(transcript)
    return transcript.to_dict(), 0


def add(verbs) -> None:
    """Adds the verb and its subcommands to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "exchange",
        help="compare methods of synchronizing replicas on a job, show a collective message by message",
        description="Compare methods of synchronizing replicas on a job, or show a collective message by message.",
        epilog=COMPARE_EXAMPLE + HOGWILD_EXAMPLE + COLLECTIVE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = verb.add_subparsers(dest="what", metavar="compare|collective|hogwild", required=True)
    _add_compare(inner)
    _add_collective(inner)
    _add_hogwild(inner)
