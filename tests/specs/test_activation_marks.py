"""A name of a line holds for an activation, its recomputation and its gradient; columns tell expressions apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.sharding.source_lines import parse_line
from jaxpar.specs.activation_marks import mark_activations
from jaxpar.specs.program import ELEMENTWISE, follow_dims

SGD = optax.sgd(0.1)
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)}


class Square(nnx.Module):
    """One line computes all activations, in one shape; those that are sorted stay whole."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return jnp.sort(self.down(nnx.gelu(self.up(x))), axis=-1)


def squares(model, batch):
    losses = (model(batch["x"]) - 1) ** 2
    return losses.sum(), jnp.float32(losses.size)


def test_a_mark_is_on_an_activation_its_recomputation_and_its_gradient():
    def loss(params, x):
        hidden = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, params[0])
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), hidden, params[1])[0] ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 8), (3, 8, 8), (4, 8))]
    marked = jax.value_and_grad(mark_activations(loss, ELEMENTWISE))
    program = follow_dims(jax.make_jaxpr(marked)(shapes[:2], shapes[2]).jaxpr, ["first", "layers"], [2], [1, 2])
    shown = {number: [array.backward for array in arrays] for number, arrays in program.marks.items()}
    assert all(passes[0] is False for passes in shown.values())
    assert sum(True in passes for passes in shown.values()) >= 3
    assert [False, True, True] in shown.values()  # of the checkpoint: forward, recomputed, gradient


def test_expressions_of_one_line_have_names_of_their_own():
    found = jp.find_specs(Square, squares, BATCH, jp.Parallel(tensor=8))
    line = Square.__call__.__code__.co_firstlineno + 1
    keys = {parse_line(text): names for text, names in found.specs.activations.items()}
    columns = {key.column: names for key, names in keys.items() if key.line == line}
    assert {names[-1] is None for names in columns.values()} == {True, False}
    assert None not in columns
    layout = jp.compose(Square, found.parallel, jax.devices()[:8])
    plain_loop.assert_alike(
        plain_loop.steps(layout, squares, SGD, BATCH), plain_loop.train(Square, Square, squares, SGD, BATCH)
    )


def test_keys_hold_for_batches_of_other_lengths_and_give_way_to_those_of_the_user():
    own = parse_line("pkg/model.py:31")
    assert own.wins_over(parse_line("model.py:31:17 [..., 4096]"))
    assert parse_line("model.py:31 [..., 8, 16, 4096]").wins_over(parse_line("model.py:31:17 [..., 16, 4096]"))
    assert not parse_line("model.py:31:9 [..., 4096]").wins_over(parse_line("model.py:31:17 [..., 4096]"))
    assert not parse_line("model.py:31 [..., 64]").wins_over(parse_line("model.py:31:17 [..., 4096]"))
    found = jp.find_specs(Square, squares, BATCH, jp.Parallel(tensor=8))
    assert {parse_line(text).sizes for text in found.specs.activations} == {(64,)}


def test_an_error_while_differentiating_has_the_line_of_the_model():
    class Host(Square):
        def __call__(self, x):
            return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), self.up(x))

    with pytest.raises(JaxparError, match=r"test_activation_marks\.py, line .*pure_callback"):
        jp.find_specs(Host, squares, BATCH, jp.Parallel(tensor=8))
