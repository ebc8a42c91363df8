"""Models that name activations in words of other code bases, or of their own, compute no more than their share."""

import jax
import jax.numpy as jnp
import pytest
import vocabularies
from flax import linen as nn
from vocabularies import batch, flop, step_of, whole_flop

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.mesh.target import missing_plugin
from jaxpar.sharding.constrain import activation_names


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        pytest.param("maxtext", marks=pytest.mark.slow),
        pytest.param("t5x", marks=pytest.mark.slow),
        pytest.param("big_vision", marks=pytest.mark.slow),
        "maxdiffusion",
        pytest.param("haliax", marks=pytest.mark.slow),
        pytest.param("own", marks=pytest.mark.slow),
        pytest.param("nnx", marks=pytest.mark.slow),
    ],
)
def test_with_names_of_its_own_a_model_computes_only_its_own_examples(words):
    assert flop(step_of(words, data=8)) == whole_flop(words) / 8


@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.nightly
@pytest.mark.parametrize(
    "words", [pytest.param("maxtext", marks=pytest.mark.slow), pytest.param("own", marks=pytest.mark.full)]
)
def test_as_compiled_for_gpus_a_model_computes_only_its_own_examples(words):
    report = jp.inspect(step_of(words, jp.target_devices("h100:1x8"), data=8), batch())
    assert report.flop.total <= 1.05 * whole_flop(words) / 8


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param("maxtext", marks=pytest.mark.slow),
        pytest.param("t5x", marks=pytest.mark.slow),
        "maxdiffusion",
        pytest.param("haliax", marks=pytest.mark.slow),
    ],
)
def test_names_of_other_code_bases_mean_what_they_mean_there(words):
    """Under every axis the program is that of the same model in jaxpar's own words."""
    layout = dict(data=2, context=2, tensor=2, sequence=True)
    ours, theirs = step_of("jaxpar" if words != "t5x" else "jaxpar, of T5X's form", **layout), step_of(words, **layout)
    assert theirs.lower(theirs.abstract(), batch()).as_text() == ours.lower(ours.abstract(), batch()).as_text()


def test_a_name_without_a_rule_constrains_nothing_and_none_is_whole():
    mesh = jp.compose(vocabularies.model("nnx"), jp.Parallel(data=8)).device_mesh
    found = {}

    def traced(x):
        with activation_names({"batch": ("data", "fsdp"), "embed": None}, dict(mesh.shape)):
            found["flax"] = nn.logical_to_mesh_axes(("batch", "rows", None, "embed"))
            jp.constrain(x, "batch", "rows", "rows", None)
        return x

    with jax.set_mesh(mesh):
        jax.eval_shape(traced, jnp.ones((8, 1, 1, 1)))
    assert found["flax"] == jax.sharding.PartitionSpec("data", jax.sharding.PartitionSpec.UNCONSTRAINED, None, None)


def test_a_rule_for_the_name_of_an_activation_is_taken():
    """`places` has none, and stays open."""
    ruled = step_of("own", data=2, tensor=4, rules={"inner": "tensor", "rows": ("data", "fsdp")})
    text = ruled.lower(ruled.abstract(), batch()).as_text()
    assert text.count('[{"data"}, {?}, {"tensor"}]') == 2  # forward and backward


def test_a_rule_that_nothing_met_is_refused_once_the_step_is_traced():
    step = step_of("own", data=8, rules={"rosw": "data"})
    with pytest.raises(JaxparError, match=r"(?s)rule 'rosw' matches nothing.*did you mean 'rows'") as caught:
        step.lower(step.abstract(), batch())
    assert len(caught.value.problems) == 1
