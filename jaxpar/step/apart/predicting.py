"""An ensemble as one model: what its replicas return on the same examples is averaged before a loss sees it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse

REPLICA = "jaxpar.replica"  # the axis of `vmap` over replicas: no name that a model gives to an axis of its own


class _Mean:
    """A model whose calls return the mean over replicas; all else is the replica's own."""

    def __init__(self, model: Any):
        self._model, self._called = model, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._called = True
        found = self._model(*args, **kwargs)
        floats = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.pmean(x, REPLICA) if floats(x) else x, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def of_mean_prediction(loss: Callable, name: str) -> Callable:
    """Returns a loss of (model, batch) that sees the mean of what all replicas return. Runs in a `vmap` over `REPLICA`.

    Raises:
      JaxparError: When it is called, if the loss does not call the model itself, but one of its methods.
    """

    def averaged(model: Any, batch: Any) -> Any:
        mean = _Mean(model)
        found = loss(mean, batch)
        if not mean._called:
            raise refuse(
                f"a loss that does not call {name}, with an exchange that averages predictions",
                rule="what a call of the model returns is averaged over replicas; what its methods return is not",
                fix='model(batch["inputs"]) in the loss, or another exchange',
            )
        return found

    return averaged
