"""Rematerialization by policy name: the policy selects the residuals to save; the backward pass recomputes the rest.

If a module's attribute (NNX) or field (Linen) `remat` is the name of a policy, the step sets it to another name and the
module applies it around each layer; around any other model the step applies the policy as a whole. A `remat` of
another kind, such as a flag, belongs to the model.
"""

from collections.abc import Callable

import jax

from jaxpar.errors import refuse, suggest
from jaxpar.models.settings.computing import POLICIES


def is_policy(value: object) -> bool:
    """Whether a value is the name of a policy."""
    return isinstance(value, str) and value in POLICIES


def remat(function: Callable, name: str, *, prevent_cse: bool = True) -> Callable:
    """Applies a policy to a function: its backward pass saves only the residuals that the policy selects.

    Args:
      function: A pure function of arrays.
      name: One of `POLICIES`.
      prevent_cse: False inside `lax.scan`, where XLA cannot merge the two computations anyway.

    Raises:
      JaxparError: If there is no such policy.
    """
    if name not in POLICIES:
        raise refuse(f"remat={name!r}", rule="a remat policy has a name", fix=suggest(name, POLICIES))
    if name == "none":
        return function
    if name == "offload":
        raise refuse(
            'remat="offload" around a function',
            rule="a step offloads the inputs of layers where they are scanned over: see jaxpar.step.block_inputs",
            fix='jp.train_step(..., remat="offload"), or remat="full"',
        )
    policy = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "all_dots": jax.checkpoint_policies.dots_saveable,
        "full": None,
    }[name]
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)
