"""`jaxpar completion bash|zsh|tcsh`: prints the shell script that completes verbs, options and files."""

import argparse
from typing import Any

EXAMPLE = """\
  $ source <(jaxpar completion bash)                     # for this shell; in ~/.bashrc for all
  $ jaxpar completion zsh > ~/.zfunc/_jaxpar              # a folder of $fpath
"""
SHELLS = ("bash", "zsh", "tcsh")
FILES = ("JOB", "RUN", "FILE", "FOLDER", "OTHER")  # metavars whose values are paths


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "completion",
        help="print the completion script of a shell",
        description="Print the script with which a shell completes verbs, options and files.",
        epilog=EXAMPLE,
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
