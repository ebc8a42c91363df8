"""`jaxpar completion bash|zsh|tcsh`: what a shell needs to complete verbs, options and files."""

import argparse
from typing import Any

EXAMPLE = """\
  $ source <(jaxpar completion bash)                     # for this shell; in ~/.bashrc for all
  $ jaxpar completion zsh > ~/.zfunc/_jaxpar              # a folder of $fpath
"""
SHELLS = ("bash", "zsh", "tcsh")
FILES = ("JOB", "RUN", "FILE", "FOLDER", "OTHER")  # metavars of what is a file or a folder


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "completion",
        help="print what a shell needs to complete commands",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("shell", choices=SHELLS, help="which shell")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the script of a shell."""
    text = script(args.shell, args.parser)
    print(text)
    return {"script": text}, 0


def script(shell: str, command: argparse.ArgumentParser) -> str:
    """Returns the script of a shell.

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
            rule="the scripts of shells are written by the package shtab",
            fix="pip install 'jaxpar[completion]'",
        ) from error
    for each in _all(command):
        for action in each._actions:
            if action.metavar in FILES:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    return shtab.complete(command, shell=shell)


def _all(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Returns a parser and those of its verbs."""
    inner = [each for action in parser._actions if isinstance(action.choices, dict) for each in action.choices.values()]
    return [parser, *(found for each in inner for found in _all(each))]
