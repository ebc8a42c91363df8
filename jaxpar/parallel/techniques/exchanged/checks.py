"""What pieces that travel ask of a call of attention: tokens and heads that the devices divide."""

import math

import jax

from jaxpar.errors import refuse
from jaxpar.parallel.techniques.exchanged.heads import repeated
from jaxpar.parallel.techniques.exchanged.ways import Ways


def check(q: jax.Array, k: jax.Array, ways: Ways, *, causal: bool) -> None:
    """Checks that pieces are equal, and that heads can be exchanged.

    Raises:
      JaxparError: If tokens do not divide in pieces, or heads in groups.
    """
    devices = ways.ring * ways.ulysses
    halves = 2 if causal and ways.ring > 1 else 1
    parts = math.lcm(devices, halves * ways.ring)
    for what, tokens in (("queries", q.shape[1]), ("keys", k.shape[1])):
        if tokens % parts:
            raise refuse(
                f"{tokens} {what} over context={devices} by {name(ways)}",
                rule=f"pieces that travel are of one size{', and in a causal ring halves of them' * (halves == 2)}: "
                f"{parts} divides the tokens",
                fix=f"sequences of {-(-tokens // parts) * parts} tokens, or context_by='gather'",
            )
    heads, groups = q.shape[2], k.shape[2]
    if ways.ulysses > 1 and heads % repeated(groups, ways):
        over = f" x tensor={ways.tensor}" if ways.tensor > 1 else ""
        raise refuse(
            f"{heads} heads, {groups} of keys, over ulysses={ways.ulysses}{over}",
            rule="each device of those that exchange heads has as many of them, of keys too, which may be repeated",
            fix=f"ulysses={_fitting(heads, groups, ways) or 'a number that divides them'}, or context_by='ring'",
        )


def name(ways: Ways) -> str:
    """Returns the name of a form."""
    if ways.ulysses == 1:
        return "ring"
    return "ulysses" if ways.ring == 1 else f"ring x ulysses, ulysses={ways.ulysses}"


def _fitting(heads: int, groups: int, ways: Ways) -> int:
    """Returns the most devices, of those there are, that could exchange heads; 0 where only one could."""
    devices = ways.ring * ways.ulysses
    fits = [
        u
        for u in range(2, devices + 1)
        if devices % u == 0 and heads % repeated(groups, Ways(devices // u, u, ways.tensor)) == 0
    ]
    return max(fits, default=0)
