"""`jaxpar bench NAME`: measurements that remember where they were taken."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from jaxpar.cli.options import add_job, add_json, check_file, prefer_huge_pages

Add = Callable[[str, str, Any], argparse.ArgumentParser]
EXAMPLE = """\
  $ jaxpar bench overhead
  the step of jaxpar beside the same program written by hand in raw JAX, and beside the same model as an expert writes
  it, interleaved in one process; an hour
  $ jaxpar bench overhead --beside expert --only "fsdp 8" --remat none --minutes 9 --out overhead.jsonl
  one row; the file has each row as soon as it is measured, and the next run goes on after them
  $ jaxpar bench checkpoint
  seconds to save and to restore a state beside Orbax's, interleaved in one process, and flipped bytes that are found
  $ jaxpar bench pipeline
  memory of a pipelined step by schedule and microbatches, as compiled for simulated devices and for eight H100s
  $ jaxpar bench fsdp2 --torch ~/torch/bin/python --rounds 20
  what a step costs two processes beside PyTorch's FSDP2, interleaved, each with remat or without, as it likes best
  $ jaxpar bench collectives --only "fsdp 8, 8B"
  the exposed communication of jobs for many GPUs by what XLA is told, as compiled for absent H100s; half an hour
  $ jaxpar bench faults --timeout 10
  seconds until all processes of a run have noticed that one is killed, stopped, late or runs another program
  $ jaxpar bench planner
  the planner's step times beside published ones: eight runs of Megatron-LM on A100s, five on H100s
  $ jaxpar bench planner --runs runs.csv --html errors.html
  the same for a table of runs of your own: errors, causes and ranks by stack, chip, source and model
  $ jaxpar bench planner --runs package --leave-out group
  120 published runs, each group predicted by constants that were fitted without it; a minute
  $ jaxpar bench gemm --write mine.toml
  which share of its peak this machine's GPU reaches in bf16 matmuls, for `jaxpar plan JOB --chip mine.toml`
  $ jaxpar bench links --write mine.toml
  latency and bandwidth that collectives reach between this machine's GPUs; started on several, between machines too
  $ jaxpar bench layers configs/digits.toml --write digits.graph.txt
  forward and backward time, activations, parameters, storage, work and depth of each layer of a job's model, on one
  device of this machine, for a minibatch of train.global_batch rows; the file is a profile for `jaxpar partition`
  $ jaxpar bench layouts configs/gpu_llama_8b_fsdp8.toml --devices 64
  the planner's seconds and bytes beside what XLA compiles, for thirty layouts drawn by chance; 15 minutes
  $ jaxpar bench memory configs/gpu_llama_8b_fsdp8.toml model.layers=16 model.dim=1024 model.heads=16 \\
      model.hidden=2816 model.vocab=32768 data.vocab=32768 data.seq=2048 train.global_batch=64 --devices 16 \\
      --out peaks.jsonl
  the planner's peak memory beside what XLA assigns, for 64 small layouts drawn by the clock; half an hour
  $ jaxpar bench exchanges configs/quickstart.toml parallel.data=8 parallel.fsdp=1 parallel.tensor=1 train.steps=300
  the loss that DiLoCo and compressed gradients cost on real data, beside an all-reduce in every step; an hour
  $ jaxpar bench batches configs/digits.toml mesh.simulate=1 parallel.data=1 parallel.fsdp=1
  the loss that large batches cost at equal epochs, with one rate and with rates that follow the batch; ten minutes
  $ jaxpar bench gpu --minutes 9
  everything that jaxpar claims about GPUs, on one of them, as far as nine minutes go; the next call goes on from there,
  and what was predicted with --plan, anywhere, stands beside what is measured

Overhead, checkpoint, pipeline, fsdp2, faults, planner, layouts, memory, exchanges and batches end with status 1 where a
bound does not hold.
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "bench",
        help="measure jaxpar itself, this machine for the planner, or the layers of a job's model",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (
        "overhead|checkpoint|pipeline|collectives|fsdp2|faults|planner|gemm|links|layers|layouts|memory|exchanges|batches"
        "|gpu"
    )
    inner = verb.add_subparsers(dest="name", metavar=names, required=True)

    def add_one(name: str, meaning: str, function: Any) -> argparse.ArgumentParser:
        one = inner.add_parser(name, help=meaning, description=meaning)
        one.set_defaults(run=function)
        return one

    _add_steps(add_one)
    _add_machines(add_one)
    _add_layouts_and_losses(add_one)
    _add_gpu(add_one)


def _add_steps(add_one: Add) -> None:
    """Adds those of jaxpar's own step, checkpoints and processes."""
    one = add_one("overhead", "the step beside two that were written by hand", overhead)
    one.add_argument(
        "--rounds",
        type=int,
        default=60,
        help="interleaved pairs per layout (default 60); beside the expert 0 compiles only",
    )
    one.add_argument(
        "--beside", choices=("twin", "expert"), help="only the overhead, or only the expert (default: both)"
    )
    one.add_argument("--only", metavar="LAYOUT", action="append", default=[], help="one layout, such as 'fsdp 8'")
    one.add_argument("--remat", choices=("none", "full"), help="beside the expert: only this (default: both)")
    one.add_argument("--minutes", type=float, default=0.0, help="beside the expert: start no row that may end later")
    one.add_argument("--out", default="", metavar="FILE.jsonl", help="beside the expert: rows to keep, and go on after")
    add_json(one)
    one = add_one("checkpoint", "saving and restoring beside Orbax", checkpoint)
    one.add_argument("--rounds", type=int, default=15, help="interleaved pairs per size (default 15)")
    add_json(one)
    add_json(add_one("pipeline", "memory of a pipelined step, by schedule and microbatches", pipeline))
    one = add_one("collectives", "exposed communication of jobs for many GPUs, by what XLA is told", collectives)
    one.add_argument("--only", metavar="JOB", action="append", default=[], help="one job, such as 'fsdp 8, 8B'")
    add_json(one)
    one = add_one("fsdp2", "a step of two processes beside PyTorch's FSDP2", fsdp2)
    one.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="one that has torch (default: this one)")
    one.add_argument("--rounds", type=int, default=20, help="interleaved pairs (default 20)")
    add_json(one)
    one = add_one("faults", "seconds until all processes have noticed what befell one", faults)
    one.add_argument("--timeout", type=float, default=30.0, help="run.timeout, in seconds (default 30)")
    add_json(one)


def _add_machines(add_one: Add) -> None:
    """Adds those of the planner's constants, beside what was published and on this machine."""
    one = add_one("planner", "predicted step times beside published ones", planner)
    one.add_argument("--runs", metavar="FILE.csv", help="a table of published runs; 'package' is jaxpar's own of 120")
    one.add_argument("--by", default="group", metavar="COLUMN", help="groups: group, system, gpu, source or model")
    one.add_argument("--leave-out", metavar="COLUMN", help="with --runs: each group by constants fitted on the others")
    one.add_argument("--html", default="", metavar="FILE", help="with --runs: write a page of the errors")
    one.add_argument("--write", default="", metavar="FILE.csv", help="with --leave-out: write the errors")
    add_json(one)
    for name, meaning, function in (
        ("gemm", "the share of its peak that a GPU reaches in bf16 matmuls", gemm),
        ("links", "latency and bandwidth that collectives reach between GPUs", links),
    ):
        one = add_one(name, meaning, function)
        one.add_argument("--write", default="", metavar="FILE.toml", help="the chip's file that this fills in")
        one.add_argument("--rounds", type=int, default=20, help="times per size (default 20)")
        add_json(one)
    one.add_argument("--per-node", type=int, default=0, help="GPUs of a machine (default: of a process)")


def _add_layouts_and_losses(add_one: Add) -> None:
    """Adds those that take a job."""
    one = add_one("layers", "time, activations and parameters of each layer of a job's model", layers)
    add_job(one)
    one.add_argument("--write", metavar="FILE", help="write them as PipeDream's profiler does")
    one = _add_drawn(add_one("layouts", "the planner beside the compiler, over layouts drawn by chance", layouts), 30)
    one.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    one = _add_drawn(add_one("memory", "the planner's peak memory beside the compiler's, likewise", memory), 64)
    one.add_argument("--seed", type=int, help="of the draw (default: the clock's seconds, which are said)")
    one.add_argument("--out", default="", metavar="FILE.jsonl", help="rows to keep, and go on after")
    one = add_one("exchanges", "the loss of a job by several ways to agree, beside an all-reduce", exchanges)
    one.add_argument("--only", metavar="METHOD", action="append", default=[], help="one method, such as 'diloco'")
    _add_seeds(one)
    one = add_one("batches", "the loss of a job by its batch, at equal epochs", batches)
    _add_seeds(one)


def _add_gpu(add_one: Add) -> None:
    """Adds that of one GPU for some minutes."""
    one = add_one("gpu", "everything that is claimed about GPUs, on one of them, within some minutes", gpu)
    one.add_argument("--out", metavar="DIR", default="gpu", help="folder of record and predictions (default: gpu)")
    one.add_argument("--minutes", type=float, default=9.0, help="stages that do not fit are left out (default 9)")
    one.add_argument("--only", metavar="STAGES", default="", help="names with commas between them (default: all)")
    one.add_argument("--chip", default="h100", help="with --plan: predictions for which GPU (default: h100)")
    one.add_argument("--rehearse", action="store_true", help="tiny sizes, on any machine: times mean nothing")
    instead = one.add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="predict, on any machine, and measure nothing")
    instead.add_argument("--table", action="store_true", help="print the README's tables, from the record")
    add_json(one)


def _add_drawn(one: argparse.ArgumentParser, count: int) -> argparse.ArgumentParser:
    add_job(one)
    one.add_argument("--devices", metavar="N", type=int, required=True, help="how many GPUs")
    one.add_argument("--chip", default="h100", help="which (default: h100)")
    one.add_argument("--count", metavar="N", type=int, default=count, help=f"layouts to draw (default {count})")
    return one


def _add_seeds(one: argparse.ArgumentParser) -> None:
    add_job(one)
    one.add_argument("--seeds", metavar="N", type=int, default=3, help="of each run (default 3)")
    one.add_argument("--out", default="", metavar="FILE.jsonl", help="rows to keep, and go on after")


def overhead(args: argparse.Namespace) -> tuple[Any, int]:
    """Measures a step beside those written by hand."""
    from jaxpar.bench.overhead.against_expert import LAYOUTS, REMAT, against_expert
    from jaxpar.bench.overhead.against_twin import against_twin
    from jaxpar.errors import nearest, refuse

    for name in args.only:
        if name not in LAYOUTS:
            raise refuse(f"--only {name!r:.60}", rule="a layout of the bench has a name", fix=nearest(name, LAYOUTS))
    rounds = _rounds(args, least=0 if args.beside == "expert" else 1)  # 0 compares what is compiled
    prefer_huge_pages()
    found: dict[str, Any] = {}
    if args.beside != "expert":
        found["twin"] = against_twin(rounds=rounds, only=args.only)
    if args.beside != "twin":
        remat = [args.remat] if args.remat else list(REMAT)
        found["expert"] = against_expert(only=args.only, remat=remat, rounds=rounds, minutes=args.minutes, out=args.out)
    return found, 0 if all(table["holds"] for table in found.values()) else 1


def checkpoint(args: argparse.Namespace) -> tuple[Any, int]:
    """Saves and restores beside Orbax."""
    from jaxpar.bench.checkpoint import checkpoint

    return _held(checkpoint(rounds=_rounds(args)))


def pipeline(args: argparse.Namespace) -> tuple[Any, int]:
    """Compiles pipelined steps, for their memory."""
    from jaxpar.bench.pipeline import pipeline

    prefer_huge_pages()
    return _held(pipeline())


def fsdp2(args: argparse.Namespace) -> tuple[Any, int]:
    """Runs both sides on two processes each."""
    from jaxpar.bench.fsdp2.pairs import fsdp2

    return _held(fsdp2(rounds=_rounds(args), torch=args.torch))


def collectives(args: argparse.Namespace) -> tuple[Any, int]:
    """Compiles jobs with each of XLA's options, for their communication."""
    from jaxpar.job.benches.collectives import JOBS, collectives

    return collectives(jobs=args.only or tuple(JOBS)), 0


def faults(args: argparse.Namespace) -> tuple[Any, int]:
    """Makes every fault happen, and takes the time."""
    from jaxpar.bench.faults.planted import faults

    prefer_huge_pages()
    return _held(faults(timeout=args.timeout))


def planner(args: argparse.Namespace) -> tuple[Any, int]:
    """Predicts published runs."""
    from jaxpar.errors import nearest, refuse

    if not args.runs:
        if args.leave_out or args.html or args.write:
            raise refuse(
                "--leave-out, --html or --write without --runs", rule="they are of a table", fix="--runs package"
            )
        from jaxpar.bench.planner import planner

        return _held(planner())
    from jaxpar.bench.published.bench import left_out, runs
    from jaxpar.bench.published.judged import BY

    by = args.leave_out or args.by
    if by not in BY:
        raise refuse(f"groups by {by!r:.40}", rule=f"one of {', '.join(BY)}", fix=nearest(by, BY))
    for option, path in (("--html", args.html), ("--write", args.write)):
        check_file(option, path or None, "errors.html" if option == "--html" else "errors.csv")
    table = None if args.runs == "package" else args.runs
    if args.leave_out:
        return left_out(table, by=by, html=args.html, to=args.write), 0
    return runs(table, by=by, html=args.html), 0


def gemm(args: argparse.Namespace) -> tuple[Any, int]:
    """Times matmuls."""
    from jaxpar.bench.gemm import gemm

    return _held(gemm(write=args.write, rounds=_rounds(args)))


def links(args: argparse.Namespace) -> tuple[Any, int]:
    """Times collectives."""
    from jaxpar.bench.links import links

    return _held(links(write=args.write, per_node=args.per_node, rounds=_rounds(args)))


def layers(args: argparse.Namespace) -> tuple[Any, int]:
    """Times the layers of a job's model."""
    from jaxpar.job.benches.layers import measured
    from jaxpar.job.file.parse import load

    check_file("--write", args.write, "own.graph.txt", anew=True)
    return measured(load(args.job, args.overrides, allow_import=args.allow_import), args.write), 0


def layouts(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares predictions with compiled programs."""
    from jaxpar.job.benches.validate_planner import layouts
    from jaxpar.job.file.parse import load
    from jaxpar.mesh.devices import leave_alone

    leave_alone()
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    return _held(layouts(job, devices=args.devices, chip=args.chip, count=args.count, seed=args.seed))


def memory(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares predicted peaks with compiled ones."""
    from jaxpar.job.benches.peak_memory import peaks
    from jaxpar.job.file.parse import load
    from jaxpar.mesh.devices import leave_alone

    leave_alone()
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    drawn = {"devices": args.devices, "chip": args.chip, "count": args.count, "seed": args.seed}
    return _held(peaks(job, **drawn, out=args.out))


def exchanges(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains a job by several ways to agree."""
    prefer_huge_pages()
    from jaxpar.job.benches.exchanges import exchanges

    return _held(exchanges(args.job, args.overrides, only=args.only, seeds=_seeds(args), out=args.out))


def batches(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains a job with several batches."""
    prefer_huge_pages()
    from jaxpar.job.benches.batches import batches

    return _held(batches(args.job, args.overrides, seeds=_seeds(args), out=args.out))


def gpu(args: argparse.Namespace) -> tuple[Any, int]:
    """Predicts, measures on a GPU, or prints what was measured."""
    from pathlib import Path

    from jaxpar.bench.gpu import day
    from jaxpar.bench.gpu.table import chosen

    stages, folder = chosen(args.only), Path(args.out)
    if args.plan:
        from jaxpar.mesh.devices import leave_alone

        leave_alone()
        return day.plan(stages, folder, chip=args.chip, rehearsal=args.rehearse), 0
    if args.table:
        return day.table(folder), 0
    return day.measure(stages, folder, minutes=_minutes(args), rehearsal=args.rehearse)


def _seeds(args: argparse.Namespace) -> int:
    from jaxpar.errors import refuse

    if args.seeds < 1:
        raise refuse(f"--seeds {args.seeds}", rule="a count is at least 1", fix="--seeds 3")
    return args.seeds


def _minutes(args: argparse.Namespace) -> float:
    from jaxpar.errors import refuse

    if not 0 < args.minutes < 1e6:
        raise refuse(f"--minutes {args.minutes}", rule="a number above 0", fix="--minutes 9")
    return args.minutes


def _held(result: dict[str, Any]) -> tuple[Any, int]:
    return result, 0 if result["holds"] else 1


def _rounds(args: argparse.Namespace, *, least: int = 1) -> int:
    from jaxpar.errors import refuse

    if args.rounds < least:
        raise refuse(f"--rounds {args.rounds}", rule=f"a count is at least {least}", fix="--rounds 20")
    return args.rounds
