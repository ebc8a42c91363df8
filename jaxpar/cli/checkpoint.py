"""`jaxpar checkpoint ls|show|verify|diff|export`: what is saved, whether it is whole, and how it differs."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_json
from jaxpar.errors import escape_control

EXAMPLE = """\
  $ jaxpar checkpoint ls runs/quickstart
  step       size  written              scores                        state
   100  9.595 MiB  2026-11-23 14:20:48  loss 1.8559 eval_loss 1.9456  whole
   150  9.594 MiB  2026-11-23 14:21:37  loss 1.7207 eval_loss 1.7976  whole
  $ jaxpar checkpoint verify runs/quickstart --all
  $ jaxpar checkpoint diff runs/quickstart configs/quickstart.toml model.dim=64
  $ jaxpar checkpoint export runs/quickstart --step 150 --to kept/quickstart-150
  $ jaxpar checkpoint export runs/quickstart --format safetensors --to quickstart-llama

RUN is a run folder (its latest checkpoint is meant, or that of --step), or one checkpoint.
"""


def add(verbs) -> None:
    """Adds the verb, and its own verbs."""
    verb = verbs.add_parser(
        "checkpoint",
        help="list, show, verify, compare and copy checkpoints",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = verb.add_subparsers(dest="what", metavar="ls|show|verify|diff|export", required=True)

    def add_one(name: str, meaning: str, function: Any, *, step: bool = True) -> argparse.ArgumentParser:
        one = inner.add_parser(name, help=meaning, description=meaning)
        one.add_argument("where", metavar="RUN", type=Path, help="a run folder, or one checkpoint")
        if step:
            one.add_argument("--step", type=int, help="which one (default: the latest)")
        add_json(one)
        one.set_defaults(run=function)
        return one

    add_one("ls", "list the checkpoints of a run", ls, step=False)
    add_one("show", "show every array of a checkpoint: shape, dtype, bytes", show)
    one = add_one("verify", "read every byte; status 1 if one is not as it was written", verify)
    one.add_argument("--all", action="store_true", help="all checkpoints of the run")
    one = add_one("diff", "compare with another checkpoint, or with a job; status 1 if they differ", diff, step=False)
    one.add_argument("other", metavar="OTHER", type=Path, help="a run folder, one checkpoint, or a job file")
    one.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    one = add_one("export", "copy a checkpoint, and verify the copy", export)
    one.add_argument("--to", metavar="FOLDER", type=Path, required=True, help="a folder that is not there yet")
    one.add_argument(
        "--format",
        default="jaxpar",
        help="jaxpar (default: as it is, with its list), safetensors (as Hugging Face keeps it), or orbax",
    )


def ls(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line per checkpoint."""
    from jaxpar.buckets import pull_folder
    from jaxpar.checkpoint import report

    rows = report.ls(pull_folder(args.where))
    print(report.table(rows) if rows else f"no checkpoint in {args.where}")
    return rows, 0


def show(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line per array."""
    from jaxpar.buckets import pull_folder
    from jaxpar.checkpoint import report

    made = report.show(pull_folder(args.where), args.step)
    print(made["path"], report.arrays_table(made["arrays"]), sep="\n")
    return made, 0


def verify(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the problems, file by file."""
    from jaxpar.buckets import pull_folder
    from jaxpar.checkpoint import report

    rows = report.verify(pull_folder(args.where), args.step, all_of_them=args.all)
    for row in rows:
        print(f"{row['path']}: {'damaged' if row['wrong'] else 'good'}")
        for each in row["wrong"]:
            print(escape_control(f"  {each}"))
    return rows, int(any(row["wrong"] for row in rows))


def diff(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line per array that differs."""
    from jaxpar.buckets import pull_folder
    from jaxpar.job import checkpoint

    found, values = checkpoint.diff(pull_folder(args.where), args.other, args.overrides)
    for each in found:
        print(escape_control(each.describe(str(args.where), str(args.other))))
    for path, largest in values.items():
        print(escape_control(f"{path.removeprefix('params/')} differs by at most {largest:.3g}"))
    if not found and not values:
        print("no difference")
    return {"differences": [asdict(each) for each in found], "values": values}, int(bool(found or values))


def export(args: argparse.Namespace) -> tuple[Any, int]:
    """Copies a checkpoint."""
    from jaxpar.units import show_bytes

    if args.format == "jaxpar":  # takes no jax
        from jaxpar.buckets import pull_folder
        from jaxpar.checkpoint import report

        made = report.export(pull_folder(args.where), args.step, args.to)
    else:
        from jaxpar.buckets import pull_folder
        from jaxpar.job import checkpoint

        made = checkpoint.export(pull_folder(args.where), args.step, args.to, form=args.format)
    print(f"{made['to']}: {show_bytes(made['bytes'])}, from {made['from']}")
    return made, 0
