"""`jaxpar new NAME`: writes a folder with a job, model, loss, data and test to start from."""

import argparse
from typing import Any

from jaxpar.cli.options import add_json

EXAMPLE = """\
  $ jaxpar new mine && cd mine
  $ jaxpar train                                         # job.toml of this folder
  $ pytest
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "new",
        help="write a folder with a job, model, loss, data and test of your own",
        description="Write a folder with a job, model, loss, data and test to edit into your own.",
        epilog=EXAMPLE,
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
