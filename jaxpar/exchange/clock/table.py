"""The simulated methods by name, each with the setting that a number after a colon sets: `ssp:3`."""

from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.clock.base import SimulatedRun
from jaxpar.exchange.clock.parameter_servers import AsynchronousEasgd, Downpour, TwoLevels
from jaxpar.exchange.clock.stale import Backup, Stale

# name to the class and the setting that a number after the colon sets; "" for none
SIMULATED = {
    "async": (Stale, ""),
    "ssp": (Stale, "bound"),
    "backup": (Backup, "extra"),
    "downpour": (Downpour, "shards"),
    "servers": (TwoLevels, "servers"),
    "async-easgd": (AsynchronousEasgd, "every"),
}


def parse_method(name: str, number: str) -> SimulatedRun | AsynchronousEasgd:
    """Constructs the method with this name and number, such as `ssp` and 3.

    Raises:
      JaxparError: If the number cannot be parsed, or is out of its range.
    """
    kind, key = SIMULATED[name]
    example = f"{name}:3" if key else name
    if bool(key) != bool(number):
        raise refuse(f"method {name}{':' * bool(number)}{number}", rule=f"it is written {example}", fix=example)
    if not key:
        return kind(name=name)
    try:
        return kind(name=name, **{key: int(number)})
    except JaxparError:
        raise
    except ValueError as error:
        raise refuse(f"method {name}:{number}", rule=f"{key} is a whole number", fix=example) from error
