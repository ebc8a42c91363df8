"""The command `jaxpar`: finds and runs the verb, and prints its errors; imports no JAX."""

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from jaxpar.cli import (
    check,
    checkpoint,
    completion,
    doctor,
    evaluate,
    exchange,
    inspect,
    launch,
    measure,
    new,
    partition,
    plan,
    report,
    sample,
    schedule,
    specs,
    sweep,
    train,
)
from jaxpar.cli.output import open_closed_streams
from jaxpar.errors import STOPPED, JaxparError, Problem, refuse, suggest
from jaxpar.mesh.xla import hush_plugin
from jaxpar.process_exit import exit_process, exit_with_supervisor

VERBS = (
    new, train, sweep, launch, check, inspect, plan, specs, partition, schedule, exchange, sample, evaluate, report,
    checkpoint, measure, doctor, completion,
)  # fmt: skip
# what others call a verb, or an option of jaxpar's
OTHER_VERBS = {
    "export": "jaxpar checkpoint export", "resume": "jaxpar train, which resumes by itself", "finetune": "jaxpar train",
    "fit": "jaxpar train", "run": "jaxpar train", "generate": "jaxpar sample", "chat": "jaxpar sample --chat",
    "convert": "jaxpar checkpoint export --format safetensors", "help": "jaxpar --help", "version": "jaxpar --version",
    "config": "jaxpar train --print-defaults", "init": "jaxpar new", "profile": "jaxpar train, with train.profile",
}  # fmt: skip
LASTING = ("train", "sweep", "launch")  # they continue when the reader of their output goes away


def main(argv: list[str] | None = None) -> int:
    """Runs one verb and returns its exit status: 0 for success, 1 for a negative result, 2 for wrong use.

    A run that a signal stopped exits with 128 plus the number of the signal.
    """
    words = sys.argv[1:] if argv is None else argv
    command = parser()
    _check_verb(command, words)
    return execute(command, words)


def execute(command: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Parses words and runs the function `run` that the parser sets; returns the exit status as `main` does."""
    open_closed_streams()
    if "JAXPAR_PROCESS" in os.environ:
        sys.excepthook = _exit_after_crash
        exit_with_supervisor()
    hush_plugin()  # before any verb creates the first device
    args, more = command.parse_known_args(words)
    args.parser = command
    if unrecognized := [
        word for word in more if word.startswith("-") or "=" not in word or not hasattr(args, "overrides")
    ]:
        key = unrecognized[0].lstrip("-")
        is_override = re.match(r"[a-z]+\.[\w.]+(=|$)", key) and hasattr(args, "overrides")
        key += "=..." * ("=" not in key)
        way_out = f"; a key of the job is overridden without dashes: {key}" if is_override else ""
        command.error(f"unrecognized arguments: {' '.join(unrecognized)}{way_out}")
    if more:  # overrides after an option: argparse does not collect these
        args.overrides += more
    try:
        if getattr(args, "json", None) and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
            raise refuse(f"--json {args.json}", rule="it is a file, in a folder that exists", fix="--json result.json")
        result, status = args.run(args)
    except JaxparError as error:
        count = len(error.problems)
        for problem in error.problems:
            print(f"{'error' if count == 1 else 'problem'}: {problem}", file=sys.stderr)
        result, status = {"problems": [problem_to_dict(problem) for problem in error.problems]}, error.status
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        _exit_if_distributed(130)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        if args.verb in LASTING and not getattr(
            args, "print_defaults", False
        ):  # the pipe that broke is another one, of the user
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if getattr(args, "json", None):
        try:
            Path(args.json).write_text(json.dumps(result, indent=2, default=str) + "\n")
        except OSError as error:
            print(f"error: --json {args.json}: {error.strerror}", file=sys.stderr)
            status = 1
    if status and status not in STOPPED.values():  # a run stopped by a signal ends together with the other processes
        _exit_if_distributed(status)
    return status


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command, with all verbs."""
    command = argparse.ArgumentParser(
        prog="jaxpar",
        description="Parallel training in JAX: any Flax model, any mesh, one declaration.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="jaxpar VERB --help shows examples.",
    )
    command.add_argument("--version", action="version", version=_version())
    verbs = command.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add(verbs)
    return command


def _check_verb(made: argparse.ArgumentParser, words: list[str]) -> None:
    """Exits with status 2 for an unknown verb, and suggests the nearest."""
    names = [verb.__name__.rpartition(".")[2] for verb in VERBS]
    if words and not words[0].startswith("-") and words[0] not in names:
        job = f"jaxpar train {words[0]}" if words[0].endswith(".toml") else ""
        made.error(f"no verb {words[0]!r:.80}: {job or OTHER_VERBS.get(words[0]) or suggest(words[0], names)}")


def _exit_if_distributed(status: int) -> None:
    """Ends the process at once if it is one of several: at exit JAX would wait for the others."""
    if "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
        exit_process(status)


def _exit_after_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends one of several processes with status 70, which the supervisor restarts (unlike a refusal)."""
    exit_process(70, "".join(traceback.format_exception(kind, error, trace)).rstrip())


def problem_to_dict(problem: Problem) -> dict[str, str]:
    """Returns a problem as a dict for JSON."""
    return {"got": problem.got, "rule": problem.rule, "fix": problem.fix}


def _version() -> str:
    from jaxpar import __version__

    return f"jaxpar {__version__}"


if __name__ == "__main__":
    sys.exit(main())
