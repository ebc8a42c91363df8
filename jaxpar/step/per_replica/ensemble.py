"""An ensemble as one model, whose output is the mean of the replicas' outputs on the same examples."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse

REPLICA = "jaxpar.replica"  # the `vmap` axis over replicas, a name that no model uses


class _Mean:
    """Wraps a replica's model: a call returns the mean over replicas; all other attributes are the replica's."""

    def __init__(self, model: Callable[..., Any]):
        self._model, self._called = model, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._called = True
        outputs = self._model(*args, **kwargs)
        is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.pmean(x, REPLICA) if is_float(x) else x, outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def ensemble_loss(loss: Callable, name: str) -> Callable:
    """Wraps a loss of (model, batch) so that the model returns the mean output. Runs in a `vmap` over `REPLICA`.

    Raises:
      JaxparError: When called, if the loss uses methods of the model without calling the model itself.
    """

    def averaged(model: Callable[..., Any], batch: Mapping[str, jax.Array]) -> Any:
        mean_model = _Mean(model)
        result = loss(mean_model, batch)
        if not mean_model._called:
            raise refuse(
                f"a loss that does not call {name}, with an exchange that averages predictions",
                rule="outputs of calls of the model are averaged over replicas, outputs of its methods are not",
                fix='model(batch["inputs"]) in the loss, or another exchange',
            )
        return result

    return averaged
