"""`jaxpar schedule NAME`: draws a pipeline schedule, estimates its cost and compares it with others."""

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from jaxpar.cli.options import add_json, check_file, wants_colour

if TYPE_CHECKING:
    from jaxpar.pipeline.tables.price import OpTimes, Price
    from jaxpar.pipeline.tables.schedule import Schedule

EXAMPLE = """\
  $ jaxpar schedule 1f1b --stages 3 --microbatches 4
  1f1b: 3 stages, 4 microbatches, 12 ticks
  stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
  stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
  stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
  F forward  B backward  . idle
  bubble 33.3% ideal, 42.9% with a barrier after every tick; times 1,1,1,0
  microbatches kept on each stage: 3, 2, 1; 16 messages per step

  $ jaxpar schedule --compare --stages 4 --microbatches 8
  $ jaxpar schedule zb_h1 --stages 4 --microbatches 8 --times 1,1.2,0.8,0.1 --svg zb_h1.svg
  $ jaxpar schedule 1f1b --stages 4 --microbatches 8 --csv own.csv
  $ jaxpar schedule own.csv --compare

If your own table cannot run, the error names its first wrong cell.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "schedule",
        help="draw a pipeline schedule, price it, compare it with the others",
        description="Draw a pipeline schedule, compute its bubble and memory, and compare it with others.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("name", metavar="NAME", nargs="?", help="a schedule of the library, or your own CSV file")
    verb.add_argument("--stages", metavar="N", type=int, help="devices along the axis pipe")
    verb.add_argument("--microbatches", metavar="N", type=int, help="microbatches per step")
    verb.add_argument("--chunks", metavar="N", type=int, help="model chunks per stage (default: the schedule's)")
    verb.add_argument(
        "--times",
        metavar="F,B,W,send",
        default="1,1,1,0",
        help="times of a stage's forward, its backward of inputs and of weights, and of a message, in any unit; "
        "a backward that is not split takes B + W (default: 1,1,1,0)",
    )
    verb.add_argument("--compare", action="store_true", help="compare all schedules of the library in one table")
    verb.add_argument("--csv", metavar="FILE", help="also write the table")
    verb.add_argument("--svg", metavar="FILE", help="also write a drawing to scale")
    add_json(verb)
    verb.set_defaults(run=run_schedule)


def run_schedule(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the table of a schedule and its cost, and with --compare those of the library."""
    from jaxpar.errors import refuse
    from jaxpar.pipeline.draw.notebook import compare, row, table
    from jaxpar.pipeline.tables.library import LIBRARY
    from jaxpar.pipeline.tables.price import price

    times = _times(args.times)
    if args.name is None and (not args.compare or args.csv or args.svg):
        raise refuse(
            "jaxpar schedule without a name",
            rule=f"it is one of {', '.join(LIBRARY)}, or a CSV file; --compare goes without",
            fix="jaxpar schedule 1f1b --stages 4 --microbatches 8",
        )
    if args.name is None:
        _check_numbers(args, "jaxpar schedule --compare")
        rows = compare(times, stages=args.stages, microbatches=args.microbatches, chunks=args.chunks)
        print(table(rows))
        return {"compare": rows}, 0
    schedule = _schedule(args)
    for option in ("csv", "svg"):
        check_file(f"--{option}", getattr(args, option), f"own.{option}")
    cost = price(schedule, times)
    print(_format_schedule(schedule, cost, args.times))
    schedule_row = row(schedule, cost)
    result: dict[str, Any] = {"schedule": schedule_row | _cells(schedule)}
    _write_files(args, schedule, times)
    if args.compare:
        rows = [] if args.name in LIBRARY else [schedule_row | {"name": args.name}]
        sizes = {key: getattr(schedule, key) for key in ("stages", "microbatches", "chunks")}
        rows += compare(times, **sizes | ({"chunks": args.chunks} if schedule.chunks == 1 else {}))
        print(f"\n{table(rows)}")
        result["compare"] = rows
    return result, 0


def _times(text: str) -> "OpTimes":
    from jaxpar.errors import refuse
    from jaxpar.pipeline.tables.price import OpTimes

    fix = "--times 1,1,1,0"
    try:
        forward, backward, weights, send = (float(number) for number in text.split(","))
    except ValueError:
        rule = "four numbers: forward, backward of inputs, backward of weights, message"
        raise refuse(f"--times {text}", rule=rule, fix=fix) from None
    times = OpTimes(forward=forward, backward=backward, weights=weights, send=send)
    if not 0 < forward + backward + weights < 1e12:
        raise refuse(f"--times {text}", rule="at least one op takes some time, and all take less than 1e12", fix=fix)
    return times


def _schedule(args: argparse.Namespace) -> "Schedule":
    """Returns the schedule of the library or of a CSV file."""
    from jaxpar.errors import JaxparError, Problem
    from jaxpar.pipeline.tables import library
    from jaxpar.pipeline.tables.csv import from_csv

    if args.name in library.LIBRARY:
        _check_numbers(args, f"jaxpar schedule {args.name}")
    elif args.name.endswith(".csv") or os.path.exists(args.name):
        schedule = from_csv(_read_csv(args.name))
        problems = [
            Problem(f"--{key} {asked} for {args.name}", f"the file says {key}={has}", f"leave --{key} out")
            for key in ("stages", "microbatches", "chunks")
            if (asked := getattr(args, key)) not in (None, has := getattr(schedule, key))
        ]
        if problems:
            raise JaxparError(*problems)
        return schedule
    return library.schedule(args.name, stages=args.stages, microbatches=args.microbatches, chunks=args.chunks)


def _read_csv(path: str) -> str:
    from pathlib import Path

    from jaxpar.errors import refuse

    rule = "a schedule is a name of the library, or a CSV file in UTF-8"
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise refuse(f"{path}: {error.strerror}", rule=rule, fix="jaxpar schedule 1f1b ... --csv own.csv") from error
    except UnicodeDecodeError as error:
        raise refuse(f"{path}: {error.reason} at byte {error.start}", rule=rule, fix="save it as UTF-8") from error


def _check_numbers(args: argparse.Namespace, what: str) -> None:
    """Raises if a number that a schedule needs is missing or below one."""
    from jaxpar.errors import JaxparError, Problem

    problems = []
    for key, usual in (("stages", 4), ("microbatches", 8), ("chunks", 2)):
        value = getattr(args, key)
        if value is None and key != "chunks":
            problems.append(Problem(f"{what} without --{key}", f"--{key} is said", f"--{key} {usual}"))
        elif value is not None and value < 1:
            problems.append(Problem(f"--{key} {value}", f"{key} is a positive whole number", f"--{key} {usual}"))
    if problems:
        raise JaxparError(*problems)


def _write_files(args: argparse.Namespace, schedule: "Schedule", times: "OpTimes") -> None:
    """Writes the files of --csv and --svg."""
    from pathlib import Path

    from jaxpar.errors import refuse
    from jaxpar.pipeline.draw.draw_schedule import svg
    from jaxpar.pipeline.tables.csv import to_csv

    for option, path in (("csv", args.csv), ("svg", args.svg)):
        if path:
            try:
                Path(path).write_text(to_csv(schedule) if option == "csv" else svg(schedule, times), encoding="utf-8")
            except OSError as error:
                rule = "it is a file that can be written"
                raise refuse(
                    f"--{option} {path}: {error.strerror}", rule=rule, fix=f"--{option} own.{option}"
                ) from error
            print(f"{option}: {path}")


def _format_schedule(schedule: "Schedule", cost: "Price", times: str) -> str:
    """Returns the table with its title and cost, coloured and wrapped if stdout is a terminal."""
    from jaxpar.pipeline.draw.draw_schedule import count_noun, describe_cut, legend, terminal
    from jaxpar.pipeline.draw.svg import printable

    screen = sys.stdout.isatty()
    colour = wants_colour()
    width = shutil.get_terminal_size().columns if screen else None
    microbatches = ", ".join(f"{peak / schedule.chunks:.3g}" for peak in schedule.peak)
    return "\n".join(
        (
            f"{printable(schedule.name)}: {describe_cut(schedule)}, {count_noun(schedule.ticks, 'tick')}",
            terminal(schedule, colour=colour, width=width),
            legend(schedule, colour=colour),
            f"bubble {cost.asynchronous_bubble:.1%} ideal, {cost.barrier_bubble:.1%} with a barrier after every tick; "
            f"times {times}",
            f"microbatches kept on each stage: {microbatches}; {count_noun(schedule.messages, 'message')} per step",
        )
    )


def _cells(schedule: "Schedule") -> dict[str, Any]:
    return {
        "placement": schedule.placement,
        "peak": list(schedule.peak),
        "cells": [[str(cell) if cell else None for cell in row] for row in schedule.cells],
    }
