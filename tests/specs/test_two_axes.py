"""Specs over two axes at once: their names train as one device does, and pasting them changes nothing."""

import ast
from functools import cache

import jax
import plain_loop
import pytest
from pairwise import some
from specs.test_trained import CASES, SGD, plain, train

import jaxpar as jp
from jaxpar.models.dim_names import spec_axes
from jaxpar.specs.operations import overlapping_dims

SIZES = {"context": 2, "tensor": 2}


@cache
def found(case, **sizes):
    model, loss, batch = CASES[case]
    return jp.find_specs(model, loss, batch, jp.Parallel(**SIZES, **sizes))


def compose(case, parallel):
    return jp.compose(CASES[case][0], parallel, jax.devices()[: 4 * parallel.data * parallel.fsdp])


def axes_of_parameters(layout):
    return {tuple(spec_axes(entry)) for place in layout.placements.values() for entry in place.used}


@pytest.mark.parametrize(
    "case", some(["lstm", "gpt", "gqa", "scanned", "towers", "pictures"], ["lstm"], ["gpt", "pictures"])
)
@pytest.mark.filterwarnings("ignore:.*each device computes")  # the matmuls of examples that no dim of theirs splits
def test_two_axes_train_as_one_device_does(case):
    layout = compose(case, found(case, data=2).parallel)
    used = {axis for axes in axes_of_parameters(layout) for axis in axes}
    assert used >= {"context", "tensor"}
    plain_loop.assert_alike(train(layout, case), plain(case))


def test_rows_and_columns_of_pictures_stay_whole():
    """A convolution whose columns an axis split trained to another loss than one device: XLA exchanges their edges."""
    arrays = [names for names in found("pictures", data=2).specs.activations.values() if len(names) == 4]
    assert arrays
    assert all(names[1:3] == (None, None) for names in arrays)


@pytest.mark.parametrize(
    ("window", "stride", "padding", "overlap"),
    [(4, 4, "VALID", False), (1, 1, "SAME", False), (3, 1, "SAME", True), (3, 2, "SAME", True), (2, 1, "VALID", True)],
)
def test_windows_of_patches_do_not_overlap_in_either_pass(window, stride, padding, overlap):
    def loss(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, padding, dimension_numbers=numbers).sum()

    shapes = jax.ShapeDtypeStruct((2, 16, 16, 4), "float32"), jax.ShapeDtypeStruct((window, window, 4, 8), "float32")
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes).jaxpr
    convolutions = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "conv_general_dilated"]
    assert len(convolutions) > 1
    assert all(any(overlapping_dims(eqn)) == overlap for eqn in convolutions)


@pytest.mark.nightly
def test_names_of_two_axes_have_one_meaning_and_can_be_pasted():
    specs = found("lstm", fsdp=2)
    fields = ("tensor", "context", "fsdp", "paths", "activations", "rules")
    pasted = ast.literal_eval(repr({name: getattr(specs.parallel, name) for name in fields}))
    layouts = [compose("lstm", parallel) for parallel in (specs.parallel, jp.Parallel(**pasted))]
    assert layouts[0].placements == layouts[1].placements
    reports = [jp.inspect(jp.train_step(layout, CASES["lstm"][1], SGD), CASES["lstm"][2]) for layout in layouts]
    assert reports[0].by_axis == reports[1].by_axis
    assert reports[0].total == reports[1].total


@pytest.mark.nightly
def test_a_dim_that_both_axes_cut_has_a_name_of_both():
    specs = found("gpt")
    both = [name for name, axes in specs.specs.rules.items() if axes == ("context", "tensor")]
    assert both
    assert set(both) & {name for names in specs.specs.paths.values() for name in names}
    text = specs.explain()
    assert "context=2 x tensor=2" in text
    assert "sent by a device over context" in text
    assert "sent by a device over tensor" in text


def test_two_axes_find_their_specs_in_compose():
    model = jp.from_nnx(CASES["lstm"][0], CASES["lstm"][2]["x"])
    layout = jp.compose(model, jp.Parallel(**SIZES, fsdp=2, specs="found"))
    assert 'specs="found": context splits' in layout.explain()
    assert "; tensor splits" in layout.explain()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*each device computes")  # what no dim of its own splits is computed twice
def test_beside_fsdp_no_dim_is_cut_by_both_axes():
    """XLA computes wrong gradients of some parameters that both axes cut along one dim, and fsdp along another."""
    specs = found("mixture", fsdp=2)
    assert {len(spec_axes(axes)) for axes in specs.specs.rules.values()} == {1}
    plain_loop.assert_alike(train(compose("mixture", specs.parallel), "mixture"), plain("mixture"))
