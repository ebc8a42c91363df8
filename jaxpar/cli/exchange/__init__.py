"""`jaxpar exchange collective`: how replicas agree, shown. A file for each of its verbs."""

import argparse

from jaxpar.cli.exchange import collective


def add(verbs) -> None:
    """Adds the verb, and its own verbs."""
    verb = verbs.add_parser(
        "exchange",
        help="how replicas agree: show a collective message by message",
        epilog=collective.EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = verb.add_subparsers(dest="what", metavar="collective", required=True)
    collective.add(inner)
