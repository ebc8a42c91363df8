"""`jaxpar new NAME`: a folder with a job, a model, a loss, data and a test, to be changed into one's own."""

import argparse
from typing import Any

from jaxpar.cli.options import add_json

EXAMPLE = """\
  $ jaxpar new mine && cd mine
  $ jaxpar train                                         # job.toml of this folder
  $ pytest
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "new",
        help="write a folder with a job, model, loss, data and test of your own",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("name", metavar="NAME", help="what the folder is called")
    add_json(verb)
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Writes the folder, and says what to do with it."""
    from jaxpar.job.template.new import new

    files = [str(file) for file in new(args.name)]
    print("\n".join(files))
    print(f"cd {args.name} && jaxpar train && pytest")
    return {"files": files}, 0
