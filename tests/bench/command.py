"""The command line of the benches: `python -m tests.bench.NAME`, from a clone of the repository."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxpar.cli.main import execute
from jaxpar.cli.options import add_job, add_json, check_file, prefer_huge_pages

TESTS = Path(__file__).parent.parent


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Runs a bench and returns its exit status: 0 if its bound holds, 1 if not, 2 for wrong use."""
    meaning, function, add_options = BENCHES[name]
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{name}", description=meaning)
    parser.set_defaults(run=function, verb=name)
    add_options(parser)
    return execute(parser, list(sys.argv[1:] if argv is None else argv))


def environment() -> dict[str, str]:
    """Returns the environment of a child process that imports `bench` and this clone's jaxpar."""
    path = filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _overhead_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        type=int,
        default=60,
        help="interleaved pairs per layout (default 60); beside the expert 0 compiles only",
    )
    parser.add_argument(
        "--beside", choices=("twin", "expert"), help="only the overhead, or only the expert (default: both)"
    )
    parser.add_argument("--only", metavar="LAYOUT", action="append", default=[], help="one layout, such as 'fsdp 8'")
    parser.add_argument("--remat", choices=("none", "full"), help="beside the expert: only this (default: both)")
    parser.add_argument("--minutes", type=float, default=0.0, help="beside the expert: start no row that may end later")
    parser.add_argument(
        "--out", default="", metavar="FILE.jsonl", help="beside the expert: file of rows, continued if there"
    )
    add_json(parser)


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="interleaved pairs per size (default 15)")
    add_json(parser)


def _collectives_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="JOB", action="append", default=[], help="one job, such as 'fsdp 8, 8B'")
    add_json(parser)


def _fsdp2_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="has torch (default: this Python)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved pairs (default 20)")
    add_json(parser)


def _faults_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=float, default=30.0, help="run.timeout, in seconds (default 30)")
    add_json(parser)


def _planner_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", metavar="FILE.csv", help="a table of published runs; 'package': the 120 kept here")
    parser.add_argument("--by", default="group", metavar="COLUMN", help="groups: group, system, gpu, source or model")
    parser.add_argument("--leave-out", metavar="COLUMN", help="with --runs: each group by constants fitted without it")
    parser.add_argument("--html", default="", metavar="FILE", help="with --runs: write a page of the errors")
    parser.add_argument("--write", default="", metavar="FILE.csv", help="with --runs: write the errors")
    add_json(parser)


def _layouts_options(parser: argparse.ArgumentParser) -> None:
    _add_drawn(parser, 30)
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")


def _memory_options(parser: argparse.ArgumentParser) -> None:
    _add_drawn(parser, 64)
    parser.add_argument("--seed", type=int, help="of the draw (default: the clock's seconds, which are printed)")
    parser.add_argument("--out", default="", metavar="FILE.jsonl", help="rows to keep, and go on after")


def _traced_models_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="MODEL", action="append", default=[], help="one model, such as 'U-Net'")
    add_json(parser)


def _traced_layouts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draw", metavar="SEED", type=int, help="of the draw (default: the clock's seconds)")
    parser.add_argument("--count", metavar="N", type=int, default=48, help="pairs to draw (default 48)")
    parser.add_argument("--only", metavar="MODEL", action="append", default=[], help="one model, such as 'U-Net'")
    parser.add_argument("--out", default="", metavar="FILE.jsonl", help="compiled rows to keep, and go on after")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no compilation later (default: no limit)")
    add_json(parser)


def _traced_decoders_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draw", metavar="SEED", type=int, help="of the draw (default: the clock's seconds)")
    parser.add_argument("--count", metavar="N", type=int, default=30, help="jobs to draw (default 30)")
    add_json(parser)


def _found_specs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="MODEL", action="append", default=[], help="one model, such as 'LSTM'")
    add_json(parser)


def _exchanges_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="METHOD", action="append", default=[], help="one method, such as 'diloco'")
    _add_seeds(parser)


def _gpu_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", default="gpu", help="folder of record and predictions (default: gpu)")
    parser.add_argument("--minutes", type=float, default=9.0, help="stages that do not fit are left out (default 9)")
    parser.add_argument("--only", metavar="STAGES", default="", help="names with commas between them (default: all)")
    parser.add_argument("--chip", default="h100", help="with --plan: predictions for which GPU (default: h100)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on any machine: times mean nothing")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="predict, on any machine, and measure nothing")
    instead.add_argument("--table", action="store_true", help="print the README's tables, from the record")
    add_json(parser)


def _add_drawn(parser: argparse.ArgumentParser, count: int) -> None:
    add_job(parser)
    parser.add_argument("--devices", metavar="N", type=int, required=True, help="how many GPUs")
    parser.add_argument("--chip", default="h100", help="which (default: h100)")
    parser.add_argument("--count", metavar="N", type=int, default=count, help=f"layouts to draw (default {count})")


def _add_seeds(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--seeds", metavar="N", type=int, default=3, help="of each run (default 3)")
    parser.add_argument("--out", default="", metavar="FILE.jsonl", help="rows to keep, and go on after")


def overhead(args: argparse.Namespace) -> tuple[Any, int]:
    """Measures a step beside those written by hand."""
    from jaxpar.errors import refuse, suggest

    from .overhead.against_expert import LAYOUTS, REMAT, against_expert
    from .overhead.against_twin import against_twin

    for name in args.only:
        if name not in LAYOUTS:
            raise refuse(f"--only {name!r:.60}", rule="a layout of the bench has a name", fix=suggest(name, LAYOUTS))
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
    from .checkpoint import checkpoint

    return _with_status(checkpoint(rounds=_rounds(args)))


def pipeline(args: argparse.Namespace) -> tuple[Any, int]:
    """Compiles pipelined steps, for their memory."""
    from .pipeline import pipeline

    prefer_huge_pages()
    return _with_status(pipeline())


def fsdp2(args: argparse.Namespace) -> tuple[Any, int]:
    """Runs both sides on two processes each."""
    from .fsdp2.pairs import fsdp2

    return _with_status(fsdp2(rounds=_rounds(args), torch=args.torch))


def collectives(args: argparse.Namespace) -> tuple[Any, int]:
    """Compiles jobs with each of XLA's options, for their communication."""
    from .collectives import JOBS, collectives

    return collectives(jobs=args.only or tuple(JOBS)), 0


def faults(args: argparse.Namespace) -> tuple[Any, int]:
    """Makes every fault happen, and takes the time."""
    from .faults.planted import faults

    prefer_huge_pages()
    return _with_status(faults(timeout=args.timeout))


def planner(args: argparse.Namespace) -> tuple[Any, int]:
    """Predicts published runs."""
    from jaxpar.errors import refuse, suggest

    if not args.runs:
        if args.leave_out or args.html or args.write:
            raise refuse(
                "--leave-out, --html or --write without --runs", rule="they are of a table", fix="--runs package"
            )
        from .planner import planner

        return _with_status(planner())
    from .published.bench import left_out, runs
    from .published.judged import BY

    by = args.leave_out or args.by
    if by not in BY:
        raise refuse(f"groups by {by!r:.40}", rule=f"one of {', '.join(BY)}", fix=suggest(by, BY))
    for option, path in (("--html", args.html), ("--write", args.write)):
        check_file(option, path or None, "errors.html" if option == "--html" else "errors.csv")
    table = None if args.runs == "package" else args.runs
    if args.leave_out:
        return left_out(table, by=by, html=args.html, to=args.write), 0
    return runs(table, by=by, html=args.html, to=args.write), 0


def layouts(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares predictions with compiled programs."""
    from jaxpar.job.file.parse import load
    from jaxpar.mesh.devices import use_cpu_only

    from .layouts import layouts

    use_cpu_only()
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    return _with_status(layouts(job, devices=args.devices, chip=args.chip, count=args.count, seed=args.seed))


def memory(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares predicted peaks with compiled ones."""
    from jaxpar.job.file.parse import load
    from jaxpar.mesh.devices import use_cpu_only

    from .memory import peaks

    use_cpu_only()
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    drawn = {"devices": args.devices, "chip": args.chip, "count": args.count, "seed": args.seed}
    return _with_status(peaks(job, **drawn, out=args.out))


def found_specs(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares specs that are found with rules, as compiled for absent GPUs."""
    from jaxpar.errors import refuse, suggest
    from jaxpar.mesh.devices import use_cpu_only

    use_cpu_only()
    from .found_specs import CASES, run

    for name in args.only:
        if name not in CASES:
            raise refuse(f"--only {name!r:.60}", rule="a model of the bench has a name", fix=suggest(name, CASES))
    return run(args.only or [*CASES])


def traced_models(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares plans of traced models with compiled programs."""
    from jaxpar.errors import refuse, suggest
    from jaxpar.mesh.devices import use_cpu_only

    use_cpu_only()
    from .traced_models import ALL, traced_models

    for name in args.only:
        if name not in ALL:
            raise refuse(f"--only {name!r:.60}", rule="a model of the bench has a name", fix=suggest(name, ALL))
    return _with_status(traced_models(args.only))


def traced_layouts(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares plans of traced models over drawn layouts with compiled programs."""
    from jaxpar.errors import refuse, suggest
    from jaxpar.mesh.devices import use_cpu_only

    use_cpu_only()
    from .traced_layouts import MODELS, traced_layouts

    for name in args.only:
        if name not in MODELS:
            raise refuse(f"--only {name!r:.60}", rule="a model of the bench has a name", fix=suggest(name, MODELS))
    result = traced_layouts(count=args.count, seed=args.draw, only=tuple(args.only), out=args.out, minutes=args.minutes)
    return _with_status(result)


def traced_decoders(args: argparse.Namespace) -> tuple[Any, int]:
    """Compares plans of decoders by their trace with those by formulas."""
    from jaxpar.mesh.devices import use_cpu_only

    use_cpu_only()
    from .traced_decoders import traced_decoders

    return _with_status(traced_decoders(count=args.count, seed=args.draw))


def exchanges(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains a job by several ways to agree."""
    prefer_huge_pages()
    from .exchanges import exchanges

    return _with_status(exchanges(args.job, args.overrides, only=args.only, seeds=_seeds(args), out=args.out))


def batches(args: argparse.Namespace) -> tuple[Any, int]:
    """Trains a job with several batches."""
    prefer_huge_pages()
    from .batches import batches

    return _with_status(batches(args.job, args.overrides, seeds=_seeds(args), out=args.out))


def gpu(args: argparse.Namespace) -> tuple[Any, int]:
    """Predicts, measures on a GPU, or prints what was measured."""
    from pathlib import Path

    from .gpu import day
    from .gpu.table import chosen

    stages, folder = chosen(args.only), Path(args.out)
    if args.plan:
        from jaxpar.mesh.devices import use_cpu_only

        use_cpu_only()
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


def _with_status(result: dict[str, Any]) -> tuple[Any, int]:
    return result, 0 if result["holds"] else 1


def _rounds(args: argparse.Namespace, *, least: int = 1) -> int:
    from jaxpar.errors import refuse

    if args.rounds < least:
        raise refuse(f"--rounds {args.rounds}", rule=f"a count is at least {least}", fix="--rounds 20")
    return args.rounds


BENCHES: dict[str, tuple[str, Callable[..., Any], Callable[[argparse.ArgumentParser], None]]] = {
    "overhead": ("the step beside two that were written by hand", overhead, _overhead_options),
    "checkpoint": ("saving and restoring beside Orbax", checkpoint, _checkpoint_options),
    "pipeline": ("memory of a pipelined step, by schedule and microbatches", pipeline, add_json),
    "collectives": ("exposed communication of jobs for many GPUs, by XLA's options", collectives, _collectives_options),
    "fsdp2": ("a step of two processes beside PyTorch's FSDP2", fsdp2, _fsdp2_options),
    "faults": ("seconds until all processes notice a fault of one", faults, _faults_options),
    "planner": ("predicted step times beside published ones", planner, _planner_options),
    "layouts": ("the planner beside the compiler, over randomly drawn layouts", layouts, _layouts_options),
    "memory": ("the planner's peak memory beside the compiler's", memory, _memory_options),
    "found_specs": (
        "specs that are found beside rules, as compiled for absent GPUs",
        found_specs,
        _found_specs_options,
    ),
    "traced_models": ("plans of traced models beside their compiled programs", traced_models, _traced_models_options),
    "traced_layouts": (
        "plans of traced models beside their compiled programs, over drawn layouts",
        traced_layouts,
        _traced_layouts_options,
    ),
    "traced_decoders": (
        "plans of decoders by their trace beside those by formulas, over drawn jobs",
        traced_decoders,
        _traced_decoders_options,
    ),
    "exchanges": ("the loss of a job by method of exchange, beside an all-reduce", exchanges, _exchanges_options),
    "batches": ("the loss of a job by its batch, at equal epochs", batches, _add_seeds),
    "gpu": ("every claim about GPUs, on one of them, within some minutes", gpu, _gpu_options),
}
