"""`jaxpar exchange compare JOB --methods ...`: trains a job with several synchronization methods."""

import argparse
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_job, check_file

EXAMPLE = """\
  $ jaxpar exchange compare configs/quickstart.toml --methods sync,local:20,diloco:20,sign,topk:0.01,ssp:3
  $ jaxpar exchange compare configs/digits.toml --methods sync,async,ssp:3 --delays pareto:2 train.steps=200
"""


def add(inner) -> None:
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
    from jaxpar.exchange.clock.delays import WorkerTimes, parse
    from jaxpar.job.compare import methods
    from jaxpar.job.file.parse import load
    from jaxpar.mesh.chips import Link
    from jaxpar.units import parse_rate, show_seconds

    check_file("--html", args.html, "exchange.html")
    link = Link(latency=5e-6, bandwidth=parse_rate(args.between))
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    times = WorkerTimes(law=parse(args.delays), compute=args.compute, seed=job.train.seed)
    selected_methods = methods.parse(args.methods, job)

    from jaxpar.job.compare import page, training
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
    print(f"\n{page.text(curves)}")
    title = f"{Path(args.job).stem}: how {training.replicas(job)} replicas agree"
    link_note = f"{args.between} per second between them, with 5 us before the first byte"
    Path(args.html).write_text(
        page.render(curves, title=title, law=args.delays, compute=args.compute, link_note=link_note)
    )
    print(f"page: {args.html}")
    return {"curves": [curve.to_dict() for curve in curves]}, 0
