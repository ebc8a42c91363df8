"""`jaxpar exchange compare|collective|hogwild`: how replicas agree, tried and shown. A file for each of its verbs."""

import argparse

from jaxpar.cli.exchange import collective, compare, hogwild


def add(verbs) -> None:
    """Adds the verb, and its own verbs."""
    verb = verbs.add_parser(
        "exchange",
        help="how replicas agree: compare methods on a job, show a collective message by message",
        epilog=compare.EXAMPLE + hogwild.EXAMPLE + collective.EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = verb.add_subparsers(dest="what", metavar="compare|collective|hogwild", required=True)
    compare.add(inner)
    collective.add(inner)
    hogwild.add(inner)
