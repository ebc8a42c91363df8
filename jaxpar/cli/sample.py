"""`jaxpar sample RUN`: text from a trained decoder."""

import argparse
from typing import Any

from jaxpar.cli.options import add_allow_import, add_json

EXAMPLE = """\
  $ jaxpar sample runs/quickstart --prompt "def main(" --tokens 200
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "sample",
        help="sample text from a trained decoder",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument("--prompt", default="\n", help="what the text begins with")
    verb.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default 200)")
    verb.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    verb.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    add_allow_import(verb)
    add_json(verb)
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the text."""
    from jaxpar.job.sample import sample

    text = sample(
        args.folder,
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        seed=args.seed,
        allow_import=args.allow_import,
    )
    print(text)
    return {"text": text}, 0
