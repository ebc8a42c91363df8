"""`jaxpar exchange compare|collective|hogwild`: compares methods of synchronization; one file per subcommand."""

import argparse

from jaxpar.cli.exchange import collective, compare, hogwild


def add(verbs) -> None:
    """Adds the verb and its subcommands to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "exchange",
        help="compare methods of synchronizing replicas on a job, show a collective message by message",
        description="Compare methods of synchronizing replicas on a job, or show a collective message by message.",
        epilog=compare.EXAMPLE + hogwild.EXAMPLE + collective.EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = verb.add_subparsers(dest="what", metavar="compare|collective|hogwild", required=True)
    compare.add(inner)
    collective.add(inner)
    hogwild.add(inner)
