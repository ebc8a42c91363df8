"""Models that jaxpar's authors did not write, on layouts: equal to one device or refused, and no process is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outcomes import Combination, outcomes

from jaxpar.errors import JaxparError
from jaxpar.pipeline.lookups import whole_lookups

PIECES = {"pipe": 2, "context": 2, "tensor": 2}
FOUR = {"microbatches": 4}


def test_any_model_looks_things_up_where_sequences_and_tables_are_in_pieces():
    """XLA ends the process on a gather between two axes inside of a pipeline; the models know nothing of it."""
    cases = [
        Combination("transformer", "one-hot", PIECES, FOUR),
        Combination("looking", "one-hot", PIECES | {"sequence": True}, FOUR),
    ]
    assert outcomes(cases) == ["equal", "equal"]


def test_a_lookup_per_row_beside_a_spread_head_is_refused():
    case = Combination("shifting", "looked up", {"pipe": 2, "data": 2, "context": 2}, FOUR | {"head": "spread"})
    (found,) = outcomes([case])
    assert found.startswith("refused: take_along_axis in Shifting or its loss")
    assert "as jp.next_token does" in found
    assert "head='last'" in found


TABLE, IDS = jnp.linspace(0.0, 1.0, 24).reshape(8, 3), jnp.array([[1, 5], [7, 1]])


def deep(table, ids):
    """Lookups in a loop, in a branch, in what is computed again, and one that writes."""
    layer = jax.checkpoint(lambda x, _: (x + jax.lax.cond(x.sum() > 0, lambda: table[ids], lambda: x), None))
    x, _ = jax.lax.scan(layer, jnp.ones((2, 2, 3)), None, length=2)
    return table.at[ids].add(x)


def test_all_lookups_are_found_wherever_they_stand_and_none_is_changed():
    seen = []

    def whole(x):
        seen.append(x.shape)
        return x

    run = whole_lookups(deep, whole)
    np.testing.assert_array_equal(run(TABLE, IDS), deep(TABLE, IDS))
    assert seen == [(2, 2, 1), (2, 2, 3), (2, 2, 1), (2, 2, 3), (8, 3)]  # a gather, then a scatter
    want, got = (jax.grad(lambda table, made=made: made(table, IDS).sum())(TABLE) for made in (deep, run))
    np.testing.assert_array_equal(got, want)


def test_a_lookup_with_a_gradient_of_its_own_is_refused():
    @jax.custom_vjp
    def pick(table, ids):
        return table[ids]

    pick.defvjp(lambda table, ids: (table[ids], ids), lambda ids, g: (jnp.zeros((8, 3)).at[ids].add(g), None))
    with pytest.raises(JaxparError, match=r"gradient of its own.*\n.*\n.*outside of that function"):
        whole_lookups(pick, lambda x: x)(TABLE, IDS)
