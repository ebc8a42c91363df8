"""`jaxpar exchange collective NAME`: runs a collective on simulated devices and shows its messages by round."""

import argparse
from typing import Any

from jaxpar.cli.options import add_json

EXAMPLE = """\
  $ jaxpar exchange collective ring --devices 3
  ring between 3 devices
  round 1  0 -> 1 [2:3] added, 1 -> 2 [0:1] added, 2 -> 0 [1:2] added
  round 2  0 -> 1 [1:2] added, 1 -> 2 [2:3] added, 2 -> 0 [0:1] added
  round 3  0 -> 1 [0:1], 1 -> 2 [1:2], 2 -> 0 [2:3]
  round 4  0 -> 1 [2:3], 1 -> 2 [0:1], 2 -> 0 [1:2]
  12 messages in 4 rounds; 12 elements in all, 4 by the device that sends most
  device 0  0 1 2  ->  30 33 36
  device 1  10 11 12  ->  30 33 36
  device 2  20 21 22  ->  30 33 36
"""


def add(inner) -> None:
    """Adds the verb to the subparsers of `jaxpar exchange`."""
    meaning = "show a collective message by message, and run it on simulated devices"
    verb = inner.add_parser("collective", help=meaning, description=meaning)
    verb.add_argument(
        "name",
        metavar="NAME",
        help="send, broadcast, reduce, gather, scatter, all_gather, reduce_scatter, all_to_all, or an all-reduce: "
        "ring, halving, butterfly, tree, two_levels",
    )
    verb.add_argument("--devices", metavar="N", type=int, default=4, help="number of devices (default: 4)")
    add_json(verb)
    verb.set_defaults(run=run_collective)


def run_collective(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the messages of a collective, and the array of each device before and after."""
    from jaxpar.errors import refuse

    if not 1 <= args.devices <= 64:
        raise refuse(f"--devices {args.devices}", rule="1 to 64 devices are simulated", fix="--devices 4")

    import jax

    from jaxpar.exchange.collectives.transcript import check, show
    from jaxpar.mesh.devices import simulate

    check(args.name)
    simulate(args.devices)
    transcript = show(args.name, jax.devices()[: args.devices])
    print(transcript)
    return transcript.to_dict(), 0
