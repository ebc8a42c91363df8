"""What the settings of all exchanges share: their table in a job, and their ranges."""

from jaxpar.exchange.collectives import algorithms

SECTION = "parallel.exchange"
STEPS = 2**31 - 1


def check_algorithm(name: str) -> None:
    """Refuses an unknown all-reduce; "" is XLA's own.

    Raises:
      JaxparError: If there is none of that name.
    """
    if name:
        algorithms.check(name)
