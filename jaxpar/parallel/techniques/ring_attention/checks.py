"""Requirements of travelling sequence shards: the devices divide tokens and heads."""

import math

import jax

from jaxpar.errors import refuse
from jaxpar.parallel.techniques.ring_attention.heads import repeated_kv_heads
from jaxpar.parallel.techniques.ring_attention.ring_devices import RingDevices


def check(q: jax.Array, k: jax.Array, ways: RingDevices, *, causal: bool) -> None:
    """Refuses unequal shards, and heads that cannot be exchanged.

    Raises:
      JaxparError: If the devices do not divide the tokens, or the groups the heads.
    """
    devices = ways.ring * ways.ulysses
    halves = 2 if causal and ways.ring > 1 else 1
    parts = math.lcm(devices, halves * ways.ring)
    for role, tokens in (("queries", q.shape[1]), ("keys", k.shape[1])):
        if tokens % parts:
            raise refuse(
                f"{tokens} {role} over context={devices} by {form_name(ways)}",
                rule=f"pieces that travel are of one size{', and in a causal ring halves of them' * (halves == 2)}: "
                f"{parts} divides the tokens",
                fix=f"sequences of {-(-tokens // parts) * parts} tokens, or context_by='gather'",
            )
    heads, groups = q.shape[2], k.shape[2]
    if ways.ulysses > 1 and heads % repeated_kv_heads(groups, ways):
        suffix = f" x tensor={ways.tensor}" if ways.tensor > 1 else ""
        raise refuse(
            f"{heads} heads, {groups} of keys, over ulysses={ways.ulysses}{suffix}",
            rule="devices that exchange heads have equally many heads, of keys too, which may be repeated",
            fix=f"ulysses={_fitting(heads, groups, ways) or 'a number that divides them'}, or context_by='ring'",
        )


def form_name(ways: RingDevices) -> str:
    """Returns the name of a form."""
    if ways.ulysses == 1:
        return "ring"
    return "ulysses" if ways.ring == 1 else f"ring x ulysses, ulysses={ways.ulysses}"


def _fitting(heads: int, groups: int, ways: RingDevices) -> int:
    """Returns the largest `ulysses` that divides devices and heads; 0 if only 1 does."""
    devices = ways.ring * ways.ulysses
    fits = [
        u
        for u in range(2, devices + 1)
        if devices % u == 0 and heads % repeated_kv_heads(groups, RingDevices(devices // u, u, ways.tensor)) == 0
    ]
    return max(fits, default=0)
