"""Checks that a sync round of replicas also moves the parameters used for evaluation."""

from typing import Any

from jaxpar.errors import refuse
from jaxpar.exchange.base import Exchange
from jaxpar.optim.eval_params import eval_arrays


def check_eval_params(exchange: Exchange, optimizer: Any) -> None:
    """Refuses an optimizer whose state determines the evaluated parameters, if sync rounds do not synchronize it.

    Args:
      exchange: The exchange between replicas.
      optimizer: The state of the optimizer's chain, as shapes.

    Raises:
      JaxparError: If a sync round moves the parameters but not the optimizer state.
    """
    if not exchange.leaves_optimizers or not (opt_state := eval_arrays(optimizer)):
        return
    raise refuse(
        f"an optimizer whose state determines the evaluated parameters (optimizer/{next(iter(opt_state))}) with "
        f"exchange {exchange}",
        rule="the evaluated parameters are computed from parameters and optimizer state, and here a sync round of "
        "replicas moves the parameters alone",
        fix='jp.Exchange("local", optimizer="averaged"), which moves both; or another optimizer',
    )
