"""Verbs that set up: a folder to start from, and the completion of a shell.

jaxpar new NAME                     writes a folder with a job, model, loss, data and test
jaxpar completion bash|zsh|tcsh     prints the shell script that completes verbs, options and files
"""

import argparse
from typing import Any

from jaxpar.cli.options import add_json

NEW_EXAMPLE = """\
  $ jaxpar new mine && cd mine
  $ jaxpar train                                         # job.toml of this folder
  $ pytest
"""
COMPLETION_EXAMPLE = """\
  $ source <(jaxpar completion bash)                     # for this shell; in ~/.bashrc for all
  $ jaxpar completion zsh > ~/.zfunc/_jaxpar              # a folder of $fpath
"""
SHELLS = ("bash", "zsh", "tcsh")
FILES = ("JOB", "RUN", "FILE", "FOLDER", "OTHER")  # metavars whose values are paths


def add_new(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "new",
        help="write a folder with a job, model, loss, data and test of your own",
        description="Write a folder with a job, model, loss, data and test to edit into your own.",
        epilog=NEW_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("name", metavar="NAME", help="name of the folder")
    add_json(verb)
    verb.set_defaults(run=write_new)


def write_new(args: argparse.Namespace) -> tuple[Any, int]:
    """Writes the folder and prints its files and the next command."""
    from jaxpar.job.starter import new

    files = [str(file) for file in new(args.name)]
    print("\n".join(files))
    print(f"cd {args.name} && jaxpar train && pytest")
    return {"files": files}, 0


def add_completion(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "completion",
        help="print the completion script of a shell",
        description="Print the script with which a shell completes verbs, options and files.",
        epilog=COMPLETION_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    verb.set_defaults(run=print_script)


def print_script(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the completion script of a shell."""
    text = script(args.shell, args.parser)
    print(text)
    return {"script": text}, 0


def script(shell: str, command: argparse.ArgumentParser) -> str:
    """Returns the completion script of a shell.

    Args:
      shell: One of `SHELLS`.
      command: The parser of the command, with all verbs.

    Raises:
      JaxparError: If the package shtab is missing.
    """
    from jaxpar.errors import refuse

    try:
        import shtab
    except ModuleNotFoundError as error:
        raise refuse(
            "jaxpar completion without shtab",
            rule="the package shtab writes the completion scripts",
            fix="pip install 'jaxpar[completion]'",
        ) from error
    for subparser in _with_subparsers(command):
        for action in subparser._actions:
            if action.metavar in FILES:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    return shtab.complete(command, shell=shell)


def _with_subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Returns a parser and, recursively, its subparsers."""
    inner = [each for action in parser._actions if isinstance(action.choices, dict) for each in action.choices.values()]
    return [parser, *(found for each in inner for found in _with_subparsers(each))]
