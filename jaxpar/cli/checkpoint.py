"""`jaxpar checkpoint ls|show|verify|diff|export`: lists, verifies, compares and copies checkpoints."""

import argparse
from collections.abc import Callable
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

RUN is a run folder (its latest checkpoint is used, or that of --step), or one checkpoint.
"""


def add(verbs) -> None:
    """Adds the verb and its subcommands to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "checkpoint",
        help="list, show, verify, compare or export the checkpoints of a run (ls, show, verify, diff, export)",
        description="List, show, verify, compare and copy the checkpoints of a run.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = verb.add_subparsers(dest="what", metavar="ls|show|verify|diff|export", required=True)

    def add_one(
        name: str, meaning: str, function: Callable[..., object], *, step: bool = True
    ) -> argparse.ArgumentParser:
        verb_parser = inner.add_parser(name, help=meaning, description=meaning)
        verb_parser.add_argument("where", metavar="RUN", type=Path, help="a run folder, or one checkpoint")
        if step:
            verb_parser.add_argument("--step", type=int, help="step of the checkpoint (default: the latest)")
        add_json(verb_parser)
        verb_parser.set_defaults(run=function)
        return verb_parser

    add_one("ls", "list the checkpoints of a run", ls, step=False)
    add_one("show", "show every array of a checkpoint: shape, dtype, bytes", show)
    verb_parser = add_one("verify", "read every byte and compare the hashes; status 1 if one differs", verify)
    verb_parser.add_argument("--all", action="store_true", help="all checkpoints of the run")
    verb_parser = add_one(
        "diff", "compare with another checkpoint, or with a job; status 1 if they differ", diff, step=False
    )
    verb_parser.add_argument("other", metavar="OTHER", type=Path, help="a run folder, one checkpoint, or a job file")
    verb_parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    verb_parser = add_one("export", "copy a checkpoint, and verify the copy", export)
    verb_parser.add_argument(
        "--to", metavar="FOLDER", type=Path, required=True, help="a folder that does not exist yet"
    )
    verb_parser.add_argument(
        "--format",
        default="jaxpar",
        help="jaxpar (default: an exact copy with its MANIFEST), safetensors (Hugging Face's format), or orbax",
    )


def ls(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line per checkpoint of a run."""
    from jaxpar.buckets import pull_folder
    from jaxpar.checkpoint import checkpoint_tables

    rows = checkpoint_tables.ls(pull_folder(args.where))
    print(checkpoint_tables.table(rows) if rows else f"no checkpoint in {args.where}")
    return rows, 0


def show(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line per array of a checkpoint: shape, dtype, bytes."""
    from jaxpar.buckets import pull_folder
    from jaxpar.checkpoint import checkpoint_tables

    contents = checkpoint_tables.show(pull_folder(args.where), args.step)
    print(contents["path"], checkpoint_tables.arrays_table(contents["arrays"]), sep="\n")
    return contents, 0


def verify(args: argparse.Namespace) -> tuple[Any, int]:
    """Reads every byte of the checkpoints and prints the damaged files."""
    from jaxpar.buckets import pull_folder
    from jaxpar.checkpoint import checkpoint_tables

    rows = checkpoint_tables.verify(pull_folder(args.where), args.step, all_of_them=args.all)
    for row in rows:
        print(f"{row['path']}: {'damaged' if row['wrong'] else 'good'}")
        for each in row["wrong"]:
            print(escape_control(f"  {each}"))
    return rows, int(any(row["wrong"] for row in rows))


def diff(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints a line per array that differs between a checkpoint and another, or a job."""
    from jaxpar.buckets import pull_folder
    from jaxpar.job import checkpoint

    array_differences, values = checkpoint.diff(pull_folder(args.where), args.other, args.overrides)
    for each in array_differences:
        print(escape_control(each.describe(str(args.where), str(args.other))))
    for path, largest in values.items():
        print(escape_control(f"{path.removeprefix('params/')} differs by at most {largest:.3g}"))
    if not array_differences and not values:
        print("no difference")
    return {"differences": [asdict(each) for each in array_differences], "values": values}, int(
        bool(array_differences or values)
    )


def export(args: argparse.Namespace) -> tuple[Any, int]:
    """Copies a checkpoint to a folder, in the requested format."""
    from jaxpar.files import expand_home
    from jaxpar.units import show_bytes

    args.to = expand_home(args.to, "--to")

    if args.format == "jaxpar":  # imports no jax
        from jaxpar.buckets import pull_folder
        from jaxpar.checkpoint import checkpoint_tables

        summary = checkpoint_tables.export(pull_folder(args.where), args.step, args.to)
    else:
        from jaxpar.buckets import pull_folder
        from jaxpar.job import checkpoint

        summary = checkpoint.export(pull_folder(args.where), args.step, args.to, form=args.format)
    print(f"{summary['to']}: {show_bytes(summary['bytes'])}, from {summary['from']}")
    return summary, 0
