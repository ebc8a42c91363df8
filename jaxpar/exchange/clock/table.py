"""The simulated methods by name, and the one number that each may be given after a colon."""

from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.clock.elastic import AsynchronousEasgd
from jaxpar.exchange.clock.events import Simulated
from jaxpar.exchange.clock.sharded import Downpour
from jaxpar.exchange.clock.stale import Backup, Stale
from jaxpar.exchange.clock.two_levels import TwoLevels

# name to the class, what it is given, and which setting a number after the colon is; "" where it takes none
SIMULATED = {
    "async": (Stale, ""),
    "ssp": (Stale, "bound"),
    "backup": (Backup, "extra"),
    "downpour": (Downpour, "shards"),
    "servers": (TwoLevels, "servers"),
    "async-easgd": (AsynchronousEasgd, "every"),
}


def simulated(name: str, number: str) -> Simulated | AsynchronousEasgd:
    """Returns a method as it is written, such as `ssp` with 3.

    Raises:
      JaxparError: If the number is none, or not in its range.
    """
    kind, key = SIMULATED[name]
    usual = f"{name}:3" if key else name
    if bool(key) != bool(number):
        raise refuse(f"method {name}{':' * bool(number)}{number}", rule=f"it is written {usual}", fix=usual)
    if not key:
        return kind(name=name)
    try:
        return kind(name=name, **{key: int(number)})
    except JaxparError:
        raise
    except ValueError as error:
        raise refuse(f"method {name}:{number}", rule=f"{key} is a whole number", fix=usual) from error
