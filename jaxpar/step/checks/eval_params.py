"""Checks that what is evaluated moves with what is trained, where replicas meet."""

from typing import Any

from jaxpar.errors import refuse
from jaxpar.exchange.base import Exchange
from jaxpar.optim.eval_params import held_for


def check_eval_params(exchange: Exchange, optimizer: Any) -> None:
    """Refuses an optimizer whose state says what is evaluated, if a meeting of replicas leaves it behind.

    Args:
      exchange: By which they meet.
      optimizer: The state of the optimizer's chain, as shapes.

    Raises:
      JaxparError: If parameters move without it.
    """
    if not exchange.leaves_optimizers or not (held := held_for(optimizer)):
        return
    raise refuse(
        f"an optimizer whose state says what is evaluated (optimizer/{next(iter(held))}) with exchange {exchange}",
        rule="what is evaluated follows from parameters and from what their optimizer keeps, and here a meeting of "
        "replicas moves the parameters alone",
        fix='jp.Exchange("local", optimizer="averaged"), which moves both; or another optimizer',
    )
