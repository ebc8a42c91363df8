"""A base in 8 bits under adapters: trained as its floats would be, kept in a quarter of the bytes, and merged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairwise import some
from test_adapters import BESIDE, CUBE, FEW, ONLY, PATHS, bits, logits
from test_fine_tune import ADAPTERS as TUNED
from test_fine_tune import exported, folder, job
from test_fine_tune import trained as tuned
from test_freeze import absent
from tiny import BATCH, Staged, assert_same_arrays, batches, models, token_loss, train

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, reading, start_from
from jaxpar.errors import JaxparError
from jaxpar.inspector.compiled import compile_program
from jaxpar.jaxprs.low_rank_path import separate_low_rank
from jaxpar.job import run_weights
from jaxpar.job.check import check
from jaxpar.job.checkpoint import _numbers, _on_one_device
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.plan_traced import state_recipe
from jaxpar.job.plan import question
from jaxpar.models.huggingface.weights import load
from jaxpar.models.low_rank import QuantizedMatrix, dequantize, low_rank_sum, quantize_matrix
from jaxpar.parallel.layout import per_device
from jaxpar.sharding.adapters import quantize
from jaxpar.sharding.names import leaves_by_path, nest

MORE = [pytest.param("bare", marks=pytest.mark.full), pytest.param("linen", marks=pytest.mark.slow)]


__all__ = ["folder"]  # a fixture


def adapted(name, base="int8"):
    return jp.add_lora(models()[name], rank=2, alpha=8, paths=PATHS[name], base=base)


def in_floats(layout, params):
    """Returns parameters whose matrices in 8 bits are the floats that they stand for."""
    flat = dict(leaves_by_path(params))
    for path, each in layout.blueprint.adapters.items():
        scales = flat.pop(f"scales/{path}")
        wide = jnp.expand_dims(scales, tuple(range(each.lead, each.lead + each.inputs)))
        flat[path] = flat[path].astype(jnp.float32) * wide
    return nest({tuple(path.split("/")): value for path, value in flat.items()})


def reference(name, layout, begun, steps=3):
    """Returns losses and parameters of plain adapters beside the floats that a base in 8 bits stands for."""
    plain = jp.compose(adapted(name, "float"), jp.Parallel(), jax.devices()[:1])
    given = {
        path: np.asarray(value) for path, value in leaves_by_path(in_floats(layout, jax.device_get(begun))).items()
    }
    state, step, losses = (
        run_weights.start_from_params(plain, ONLY, given, seed=1),
        jp.train_step(plain, token_loss, ONLY),
        [],
    )
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state.params


@pytest.mark.nightly
@FEW
@pytest.mark.parametrize("name", ["annotated", *MORE])
def test_a_base_in_8_bits_is_trained_over_a_cube_as_its_floats_are_on_one_device(name):
    losses, state, step = train(adapted(name), CUBE, chain=ONLY, steps=3)
    begun = jp.init_state(step.layout, ONLY, seed=1)
    want, params = reference(name, step.layout, begun.params)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert losses[-1] != losses[0]
    assert_same_arrays(state.params["adapters"], params["adapters"])
    kept, now = bits(begun.params), bits(state.params)
    assert not [path for path in kept if not path.startswith("adapters/") and kept[path] != now[path]]
    assert not set(bits(begun.params["adapters"]).items()) & set(bits(state.params["adapters"]).items())


@pytest.mark.parametrize("name", ["annotated", *MORE])
def test_the_bytes_of_a_base_are_one_for_each_entry_and_four_for_each_output(name):
    layout, plain = (jp.compose(adapted(name, base), jp.Parallel(), 1) for base in ("int8", "float"))
    matrices = {path: layout.placements[path] for path in layout.blueprint.adapters}
    outputs = sum(layout.placements[f"scales/{path}"].leaf.size for path in matrices)
    assert {str(jnp.dtype(place.leaf.dtype)) for place in matrices.values()} == {"int8"}
    saved = per_device(plain, plain.placements) - per_device(layout, layout.placements)
    assert saved == 3 * sum(place.leaf.size for place in matrices.values()) - 4 * outputs
    assert layout.explain().count("frozen, in 8 bits") == len(matrices)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("annotated", marks=pytest.mark.slow),
        pytest.param("bare", marks=pytest.mark.full),
        pytest.param("linen", marks=pytest.mark.full),
    ],
)
def test_what_is_merged_of_8_bits_computes_the_same_without_adapters(name):
    plain, layout = (jp.compose(each, jp.Parallel(), 1) for each in (models()[name], adapted(name)))
    params, _ = layout.blueprint.init(jax.random.key(1))
    rng = np.random.default_rng(0)
    params["adapters"] = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params["adapters"])
    made, batch = jp.merge_lora(layout, params), next(batches(1))
    assert {path: (x.shape, x.dtype) for path, x in leaves_by_path(made).items()} == {
        path: (place.leaf.shape, place.leaf.dtype) for path, place in plain.placements.items()
    }
    np.testing.assert_allclose(logits(plain, made, batch), logits(layout, params, batch), rtol=1e-5, atol=1e-5)
    bare = {**params, "adapters": jax.tree.map(jnp.zeros_like, params["adapters"])}
    untouched, _ = plain.blueprint.init(jax.random.key(1))
    for path, x in leaves_by_path(
        jp.merge_lora(layout, bare)
    ).items():  # rounded to half of the 127th part of the largest entry
        assert (
            np.abs(x - leaves_by_path(untouched)[path]).max()
            <= np.abs(leaves_by_path(untouched)[path]).max() / 127 * 0.501
        )


@pytest.mark.nightly
def test_a_matrix_is_within_half_a_scale_of_what_it_was_and_zeros_stay():
    wide = jax.random.normal(jax.random.key(0), (3, 8, 4, 6)).at[:, :, 1, 2].set(0)
    held, scales = quantize_matrix(wide, lead=1, inputs=1)
    assert (held.dtype, scales.shape) == (jnp.int8, (3, 4, 6))
    assert np.abs(held).max(axis=1)[:, 0].min() == 127
    back = dequantize(held, scales[:, None], jnp.float32)
    assert (np.abs(back - wide) <= scales[:, None] * 0.5001).all()
    assert not back[:, :, 1, 2].any()


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("lead", "inputs"),
    [pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(1, 1, marks=pytest.mark.slow), (1, 2), (2, 1)],
)
def test_what_is_read_from_files_is_rounded_as_a_whole_matrix_is_part_by_part(lead, inputs):
    wide = np.asarray(jax.random.normal(jax.random.key(0), (2, 4, 6, 8)))
    read: list[int] = []

    class Lies:
        shape = wide.shape

        def __getitem__(self, index):
            read.append(wide[index].size)
            return wide[index]

    made, (held, scales) = (
        QuantizedMatrix("w", Lies(), lead, inputs),
        quantize_matrix(jnp.asarray(wide), lead=lead, inputs=inputs),
    )
    halves = [slice(0, 1), slice(1, 2)], [slice(None)], [slice(0, 3), slice(3, 6)], [slice(0, 4), slice(4, None)]
    for index in [(a, b, c, d) for a in halves[0] for b in halves[1] for c in halves[2] for d in halves[3]]:
        np.testing.assert_array_equal(made.int8_values(index), held[index])
        of_scales = (*index[:lead], *index[lead + inputs :])
        np.testing.assert_array_equal(made.scales(of_scales), scales[of_scales])
    assert max(read) <= wide.size // int(np.prod(wide.shape[:lead]))  # one layer at most


def test_a_matrix_that_is_not_finite_is_not_rounded():
    with pytest.raises(JaxparError, match="w has entries that are not finite"):
        QuantizedMatrix("w", np.array([[1.0, np.inf]]), 0, 1).int8_values((slice(None), slice(None)))


RNG = np.random.default_rng(1)  # not by JAX, which would compile while tests are collected
WIDE = jnp.asarray(RNG.normal(size=(6, 2, 4)).astype(np.float32))
HELD, SCALES = quantize_matrix(WIDE, lead=0, inputs=1)
A, B = (jnp.asarray(RNG.normal(size=s).astype(np.float32)) for s in [(6, 3), (3, 2, 4)])


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("read", some(BESIDE, [], ["x @ W", "over its outputs", "in a branch"]))
def test_scales_beside_a_matrix_are_what_its_entries_are_multiplied_by(read):
    def loss(a, b, *, made, w):
        return jnp.sum(jnp.square(made(lambda a, b: BESIDE[read](lambda: w(a, b)))(a, b)).astype("float32"))

    held = lambda a, b: low_rank_sum(HELD, a, b, SCALES)  # noqa: E731
    floats = lambda a, b: low_rank_sum(dequantize(HELD, SCALES, jnp.float32), a, b)  # noqa: E731
    got = jax.value_and_grad(lambda a, b: loss(a, b, made=separate_low_rank, w=held), (0, 1))(A, B)
    want = jax.value_and_grad(lambda a, b: loss(a, b, made=lambda f: f, w=floats), (0, 1))(A, B)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(other).max()))
    # the matrix is never written down, in floats or as a sum
    assert "low_rank_sum" not in str(jax.make_jaxpr(lambda a: loss(a, B, made=separate_low_rank, w=held))(A))


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("dims", ["bi,iok->bok", "iok,bi->okb", "bok,iok->bi", "bko,iok->bi", "iok,bok->ib"])
def test_a_gradient_goes_back_through_8_bits_as_through_their_floats(dims):
    ins = dims.split("->")[0].split(",")
    at = ins.index("iok")
    x = jax.random.normal(jax.random.key(2), [dict(b=5, i=6, o=2, k=4)[d] for d in ins[1 - at]])

    def loss(x, w):
        return jnp.sum(jnp.sin(jnp.einsum(dims, *((x, w) if at else (w, x)))))

    got = jax.value_and_grad(separate_low_rank(lambda x: loss(x, low_rank_sum(HELD, A, B, SCALES))))(x)
    want = jax.value_and_grad(lambda x: loss(x, low_rank_sum(dequantize(HELD, SCALES, x.dtype), A, B)))(x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5 * float(jnp.abs(want[1]).max()))
    text = str(jax.make_jaxpr(separate_low_rank(lambda x: loss(x, low_rank_sum(HELD, A, B, SCALES))))(x))
    assert "low_rank_sum" not in text


@FEW
@pytest.mark.full
@pytest.mark.parametrize("layout", [{"fsdp": 8, "zero": 2}, {"fsdp": 8}], ids=["ZeRO-2", "ZeRO-3"])
def test_8_bits_are_read_in_half_precision_and_their_scales_in_float32(layout):
    losses, *_ = train(adapted("annotated"), jp.Parallel(**layout), chain=ONLY, steps=3, precision="bf16")
    want, *_ = train(adapted("annotated"), jp.Parallel(), jax.devices()[:1], chain=ONLY, steps=3)
    np.testing.assert_allclose(losses, want, rtol=2e-2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: jp.add_lora(Staged, rank=2, paths=["blocks"], base="int4"), ("base = 'int4'", "float or int8")),
        (lambda: jp.compose(jp.add_lora(Staged, rank=2, paths=["blocks"], base="int8"), jp.Parallel(pipe=2), 2),
         ("pipe=2", "no gradients", 'base="float"')),
        (lambda: jp.compose(jp.add_lora(Staged, rank=2, paths=["blocks"], base="int8"),
                            jp.Parallel(data=2, exchange=jp.Exchange("local", every=2)), 2),
         ("exchange", "no gradients")),
        (lambda: jp.train_step(jp.compose(adapted("annotated"), jp.Parallel(), 1), token_loss, optax.sgd(0.1)),
         ("is int8, and the optimizer reads its gradient", "jp.freeze")),
        (lambda: jp.train_step(jp.compose(adapted("annotated"), jp.Parallel(), 1), token_loss,
                               optax.chain(optax.clip_by_global_norm(1.0), ONLY)),
         ("is int8, and the optimizer reads its gradient", "jp.freeze")),
    ],
    ids=["no such base", "a pipeline", "replicas apart", "trained", "its norm is read"],
)  # fmt: skip
def test_8_bits_where_they_make_no_sense_are_refused(make, said):
    with pytest.raises(JaxparError) as caught:
        make()
    assert not [word for word in said if word not in str(caught.value)], str(caught.value)


def compiled(base, parallel):
    """Returns a layout, its step and a batch for GPUs that are not there."""
    settings = jp.DecoderConfig(vocab=256, seq=128, layers=4, dim=256, heads=4, kv_heads=2, hidden=512)
    model = jp.add_lora(lambda rngs: jp.Decoder(settings, rngs=rngs), rank=4, paths=["blocks/*"], base=base)
    layout = jp.compose(model, parallel, jp.target_devices(f"h100:1x{parallel.fsdp}"))
    step = jp.train_step(layout, jp.next_token_loss, ONLY, precision="bf16")
    return layout, step, {name: jax.ShapeDtypeStruct((8, 128), np.int32) for name in ("inputs", "targets")}


@absent
@pytest.mark.full
def test_on_a_gpu_8_bits_are_all_that_is_kept_of_a_base():
    """Arguments fall by what theory says, and what is in floats besides is a layer at most."""
    sizes, texts = {}, {}
    for base in ("float", "int8"):
        layout, step, batch = compiled(base, jp.Parallel())
        made = compile_program(step.lower(step.abstract(), batch), list(layout.device_mesh.devices.flat))
        sizes[base], texts[base] = (made.arguments, made.temporary), made.text
    matrices = {path: layout.placements[path].leaf for path in layout.blueprint.adapters}
    entries = sum(leaf.size for leaf in matrices.values())
    outputs = sum(layout.placements[f"scales/{path}"].leaf.size for path in matrices)
    # XLA begins each array at a multiple of bytes
    assert sizes["float"][0] - sizes["int8"][0] == pytest.approx(3 * entries - 4 * outputs, rel=1e-4)
    stacks = {",".join(map(str, leaf.shape)) for leaf in matrices.values()}
    kept = {kind: [stack for stack in stacks if f"{kind}[{stack}]" in texts["int8"]] for kind in ("s8", "bf16", "f32")}
    assert kept == {"s8": list(stacks), "bf16": [], "f32": []}
    assert [stack for stack in stacks if f"bf16[{stack}]" in texts["float"]]  # as the backward pass keeps plain ones
    assert sizes["int8"][1] <= sizes["float"][1] + 4 * entries / 4


@pytest.mark.spread(0)
@absent
@pytest.mark.parametrize(
    "zero", [pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.slow)]
)  # fmt: skip
def test_over_fsdp_a_base_is_gathered_in_8_bits(zero):
    layout, step, batch = compiled("int8", jp.Parallel(fsdp=8, zero=zero))
    gathered = {}
    for entry in jp.inspect(step, batch).ledger:
        if entry.kind == "all-gather":
            gathered[entry.dtype] = gathered.get(entry.dtype, 0) + entry.step_payload
    entries = sum(layout.placements[path].leaf.size for path in layout.blueprint.adapters)
    assert gathered["s8"] == entries
    rest = sum(place.leaf.size for path, place in layout.placements.items() if path not in layout.blueprint.adapters)
    assert sum(size for kind, size in gathered.items() if kind != "s8") <= 4 * rest


@FEW
@pytest.mark.nightly
def test_a_state_in_8_bits_is_saved_and_restored_bit_for_bit_on_another_layout(tmp_path):
    """And what begins with a run in floats is that run's matrices, rounded."""
    floats, eight = (jp.compose(adapted("annotated", base), CUBE) for base in ("float", "int8"))
    whole = jp.init_state(floats, ONLY, seed=3)
    jp.save(tmp_path / "floats", whole)
    state, origin = start_from.start(
        Checkpoints(start_from=str(tmp_path / "floats")), jp.init_state(eight, ONLY), eight, ONLY,
    )  # fmt: skip
    assert not origin.fresh
    assert bits(state.params) == bits(quantize(eight.blueprint.adapters, jax.device_get(whole.params)))
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, state, jp.init_state(eight, ONLY)))
    jp.save(tmp_path / "eight", state)
    other = jp.train_step(jp.compose(adapted("annotated"), jp.Parallel(fsdp=4), jax.devices()[:4]), token_loss, ONLY)
    assert bits(jp.restore(tmp_path / "eight", other).params) == bits(state.params)
    again, _ = start_from.start(
        Checkpoints(start_from=str(tmp_path / "eight")), jp.init_state(eight, ONLY, seed=9), eight, ONLY,
    )  # fmt: skip
    assert bits(again.params) == bits(state.params)


@pytest.mark.slow
def test_a_fit_begins_with_a_run_in_floats_rounded_and_no_cast_makes_floats_of_8_bits(tmp_path):
    one = jax.devices()[:1]
    floats, eight = (jp.compose(adapted("annotated", base), jp.Parallel(), one) for base in ("float", "int8"))
    whole = jp.init_state(floats, ONLY, seed=3)
    jp.save(tmp_path / "floats", whole)
    begun = jp.fit(
        jp.train_step(eight, token_loss, ONLY), list(batches(1)), steps=1, batch=BATCH,
        checkpoints=Checkpoints(start_from=str(tmp_path / "floats")),
    ).state  # fmt: skip
    want = quantize(eight.blueprint.adapters, jax.device_get(whole.params))
    got, want = ({path: value for path, value in leaves_by_path(tree).items() if not path.startswith("adapters")}
                 for tree in (jax.device_get(begun.params), want))  # fmt: skip
    assert bits(got) == bits(want)
    jp.save(tmp_path / "eight", begun)
    with pytest.raises(JaxparError, match=r"is int8 in the checkpoint, float32 in the job\n.*\n.*--format safetensors"):
        start_from.start(Checkpoints(start_from=str(tmp_path / "eight"), cast=True), whole, floats, ONLY)


EIGHT = TUNED[:-1] + ', base = "int8"}'


@FEW
@pytest.mark.nightly
def test_a_folder_is_tuned_in_8_bits_resumed_and_exported_as_its_rounded_matrices_with_what_was_learned(folder):
    tuned(folder, "run", "train.steps=3", train=EIGHT)
    done, _ = tuned(folder, "run", train=EIGHT)
    assert done["resumed_from"] == 3
    run = folder.parent / "run"
    first, last = (
        {
            name: _numbers(array)
            for name, array in reading.read_arrays(path, found, _on_one_device(found.arrays)).items()
        }
        for path in sorted((run / "checkpoints").iterdir())
        for found in [reading.read_manifest(path)]
    )
    frozen = [name for name in last if name.startswith("params/") and not name.startswith("params/adapters/")]
    assert all(first[name].tobytes() == last[name].tobytes() for name in frozen)
    written, begun = load(exported(folder, "run")), load(folder)
    for path, tensor in begun.params.items():
        want = tensor[...]
        if f"params/scales/{path}" in last:
            held, scales = last[f"params/{path}"], last[f"params/scales/{path}"]
            a, b = (last[f"params/adapters/{path}/{part}"] for part in ("first", "second"))
            want = held * scales.reshape(len(held), *(1,) * (a.ndim - 2), *scales.shape[1:]) + 4.0 * np.stack(
                [np.tensordot(one, other, 1) for one, other in zip(a, b, strict=True)]
            )
        np.testing.assert_allclose(written.params[path][...], want, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_a_plan_and_a_check_count_a_base_in_8_bits(folder):
    eight, plain = (job(folder, "x", train=train) for train in (EIGHT, TUNED))
    assert check(eight) == []
    sizes = {path: tensor[...].size for path, tensor in load(folder).params.items()}
    layout = jp.compose(resolve_model(eight, resolve_loss(eight)), jp.Parallel(), 1)
    counts = [sum(place.leaf.size for place in layout.placements.values())]
    counts.append(sum(size for path, size in sizes.items() if path in layout.blueprint.adapters))
    scales = sum(place.leaf.size for path, place in layout.placements.items() if path.startswith("scales/"))
    saved = state_recipe(plain).parameters * (counts[0] - scales) - state_recipe(eight).parameters * counts[0]
    assert saved == pytest.approx(3 * counts[1] - 4 * scales)
    (problem,) = check(job(folder, "x", "checkpoint.start_from=", train=EIGHT))
    assert 'base = "int8" without checkpoint.start_from' in problem.got
    asked = question(
        job(folder, "x", "train.precision=bf16", train=EIGHT), devices=8, chip="h100", per_node=None, options={}
    )
    assert asked.choices.pipe == 1
