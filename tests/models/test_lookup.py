"""A table that is cut by its columns is looked up, and its gradient added up, as on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairwise import some

import jaxpar as jp
from jaxpar.models.blocks.lookup import COLUMNS, ROWS, look_up
from jaxpar.step.losses import cross_entropy

VOCAB, DIM, ROWS_OF_BATCH, SEQ = 24, 16, 8, 8
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS_OF_BATCH, SEQ), dtype=np.int32)
TOKENS[0, :3] = (
    -1,
    VOCAB,
    VOCAB + 5,
)  # numbers of no token: as `jnp.take` has it, nan, the last but none, and no gradient
SMALL = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=1, dim=DIM, heads=2, hidden=DIM)
LAYOUTS = {
    "by columns and rows": jp.Parallel(data=2, fsdp=2, tensor=2),
    "sequences too": jp.Parallel(fsdp=2, context=2, tensor=2),
}


def on(layout, function, *args):
    """Returns a function of arrays as a step of a layout computes it."""
    step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1))
    with step.compiler.trace_context():
        return jax.jit(function)(*args)


@pytest.mark.spread(0)
@pytest.mark.parametrize("name", some(LAYOUTS, ["sequences too"]))
def test_what_is_looked_up_and_its_gradient_are_those_of_one_device(name):
    layout = jp.compose(partial(jp.Decoder, SMALL), LAYOUTS[name])
    table, weights = (jax.random.normal(jax.random.key(i), (VOCAB, DIM)) for i in range(2))
    upstream = jnp.take(weights, jnp.abs(TOKENS) % VOCAB, axis=0)

    def both(look, table):
        looked, back = jax.vjp(lambda table: look(table, TOKENS), table)
        return looked, back(upstream)[0]

    found = on(layout, partial(both, look_up), table)
    expected = both(lambda table, tokens: jnp.take(table, tokens, axis=0), table)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_only_a_table_that_is_no_head_is_cut_by_its_columns():
    def names(**more):
        settings = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=4, dim=DIM, heads=2, tied=more.pop("tied", False))
        return jp.compose(partial(jp.Decoder, settings), jp.Parallel(**more)).describe("embed")

    assert (ROWS, COLUMNS) == ("vocab_table", "embed_table")
    assert names(data=2, fsdp=2, tensor=2) == "f32[vocab_table/fsdp, embed_table/tensor]"
    assert names(data=2, fsdp=2, tensor=2, tied=True) == "f32[vocab/tensor, embed/fsdp]"
    assert names(pipe=2, fsdp=2, tensor=2) == "f32[vocab_table/tensor, embed_table/fsdp]"  # both ends as one


@pytest.mark.nightly
def test_losses_of_a_vocabulary_in_parts_are_those_of_the_whole():
    layout = jp.compose(partial(jp.Decoder, SMALL), LAYOUTS["by columns and rows"])
    logits = 5 * jax.random.normal(jax.random.key(2), (4, 6, VOCAB))
    logits = logits.at[0, 0, : VOCAB // 2].set(-jnp.inf)  # a part without any logit
    labels = jax.random.randint(jax.random.key(3), (4, 6), VOCAB // 2, VOCAB).at[0, 1].set(-1)

    def both(logits):
        losses, back = jax.vjp(lambda logits: cross_entropy(logits, labels), logits)
        return losses, back(jnp.where(labels < 0, 0.0, jnp.arange(24.0).reshape(4, 6)))[0]

    found, expected = on(layout, both, logits), both(logits)
    assert jnp.isnan(found[0][0, 1])
    assert jnp.isnan(expected[0][0, 1])
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
