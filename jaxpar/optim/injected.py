"""Settings of an optimizer that are arrays in its state, so that one compiled program runs any of them.

They are optax's own: `optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)` has its learning rate there.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from optax.schedules import InjectStatefulHyperparamsState

from jaxpar.errors import refuse


def settings(state: Any, names: Iterable[str]) -> dict[str, jax.Array]:
    """Returns settings in the state of a chain, by name.

    Raises:
      JaxparError: If there are none of such a name.
    """
    found: dict[str, jax.Array] = {}
    _visited(lambda node: found.update(node.hyperparams), state)
    for name in names:
        if name not in found:
            raise refuse(
                f"no setting {name!r} in the optimizer's state, which has {', '.join(found) or 'none'}",
                rule="a setting that members of a population differ in is an array in the optimizer's state",
                fix=f"optax.inject_hyperparams(optax.adamw)({name}=...)",
            )
    return {name: found[name] for name in names}


def with_settings(state: Any, values: Mapping[str, jax.Array]) -> Any:
    """Returns the state of a chain with other values of settings that it has."""

    def one(node: InjectStatefulHyperparamsState) -> InjectStatefulHyperparamsState:
        own = node.hyperparams
        return node._replace(hyperparams={name: values.get(name, own[name]) for name in own})

    return _visited(one, state)


def _visited(change: Callable, state: Any) -> Any:
    injected = lambda node: isinstance(node, InjectStatefulHyperparamsState)  # noqa: E731
    return jax.tree.map(lambda node: change(node) if injected(node) else node, state, is_leaf=injected)
