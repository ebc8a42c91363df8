"""`jp.mixture`: the sums of plain loops, every choice counted, and one device's training on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from experts.mixtures import DIM, EXPERTS, HIDDEN, K, LinenModel, Model, batch_of, by_hand, gated, loss
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import STEPS

import jaxpar as jp
from jaxpar.models.blocks.dispatch import assign_slots, combine
from jaxpar.parallel.techniques.expert_slots import mixture as dispatched

OPTIMIZER = optax.sgd(0.3, momentum=0.9)


def example(seed, rows=3, seq=10, spare=0, experts=EXPERTS, dtype=np.float64):
    numbers = np.random.default_rng(seed)
    shapes = {"gate": (experts, DIM, HIDDEN), "up": (experts, DIM, HIDDEN), "down": (experts, HIDDEN, DIM)}
    params = {name: numbers.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    choices = np.argsort(numbers.normal(size=(rows, seq, experts)), axis=-1)[..., : K + spare].astype(np.int32)
    return (
        params,
        numbers.normal(size=(rows, seq, DIM)).astype(dtype),
        choices,
        numbers.uniform(size=(rows, seq, K)).astype(dtype),
    )


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("capacity", "spare", "in_slots"),
    [
        (1.0, 3, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (None, 0, False), (1.0, 0, False), (1.0, 3, False), (0.5, 2, False),
                (None, 0, True), (1.0, 0, True), (0.5, 2, True),
            ]
        ),
    ],
)  # fmt: skip
def test_sums_and_counts_are_those_of_plain_loops(capacity, spare, in_slots):
    with jax.enable_x64(True):
        params, x, choices, weights = example(0, spare=spare)
        run = jp.mixture if not in_slots else in_an_implementation
        y, load = run(
            gated, jax.tree.map(jnp.asarray, params), *map(jnp.asarray, (x, choices, weights)), capacity=capacity
        )
        slots = x.shape[1] if capacity is None else int(np.ceil(capacity * K * x.shape[1] / EXPERTS))
        for row in range(len(x)):
            expected, counts = by_hand(params, x[row], choices[row], weights[row], slots)
            np.testing.assert_allclose(y[row], expected, rtol=1e-9, atol=1e-9)
            for name, count in counts.items():
                np.testing.assert_array_equal(getattr(load, name)[row], count, err_msg=name)


def in_an_implementation(*arguments, **options):
    from jaxpar.models.islands import use_islands

    with use_islands({"mixture": dispatched}):
        return jp.mixture(*arguments, **options)


def test_gradients_are_those_of_the_loop():
    with jax.enable_x64(True):
        params, x, choices, weights = example(1, spare=2)
        target = np.random.default_rng(2).normal(size=x.shape)

        def total(run):
            def one(params, x, weights):
                return jnp.sum(target * run(gated, params, x, jnp.asarray(choices), weights, capacity=0.75)[0])

            return jax.jit(jax.grad(one, (0, 1, 2)))(params, x, weights)

        for ours, plain in zip(*map(jax.tree.leaves, (total(in_an_implementation), total(jp.mixture))), strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("capacity", [1, 2, 6])
def test_a_sum_of_slots_saves_the_smaller_of_slots_and_choices(capacity):
    numbers = np.random.default_rng(0)
    choices = np.argsort(numbers.random((8, 4)))[:, :2]
    slots = assign_slots(jnp.asarray(choices), per_token=2, experts=4, capacity=capacity)
    y, weights = (jnp.asarray(numbers.random(shape), jnp.float32) for shape in ((4 * capacity, 5), (8, 2)))

    def plain(y, weights):
        return jnp.einsum("sk,skd->sd", weights, jnp.take(y, slots.slot, axis=0, mode="fill", fill_value=0))

    expected, plain_gradient = jax.vjp(plain, y, weights)
    sums, gradient = jax.vjp(lambda y, weights: combine(y, weights, slots.slot, slots.choice), y, weights)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    for ours, theirs in zip(gradient(sums), plain_gradient(sums), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert sum(x.size for x in jax.tree.leaves(gradient) if x.shape[1:] == (5,)) == min(4 * capacity, 16) * 5


@pytest.mark.nightly
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_every_choice_is_kept_spilled_or_dropped_and_no_slot_is_given_twice(data):
    sharing = data.draw(st.integers(1, 3))
    experts = sharing * data.draw(st.integers(1, 6 // sharing))
    k = data.draw(st.integers(1, experts))
    asked = data.draw(st.integers(k, experts))
    tokens, capacity = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    # from all experts equally to one that everybody asks, and tokens that do not count
    favourite = data.draw(st.booleans())
    rows = []
    for _ in range(tokens):
        order = data.draw(st.permutations(range(experts)))
        order = [0, *(e for e in order if e)] if favourite else list(order)
        rows.append(order[:asked] if data.draw(st.integers(0, 4)) else [experts] * asked)
    choices = np.array(rows, np.int32)
    slots = assign_slots(jnp.asarray(choices), per_token=k, experts=experts, capacity=capacity, sharing=sharing)
    load = jax.tree.map(np.asarray, slots.load)
    np.testing.assert_array_equal(load.sent, load.kept + load.spilled + load.dropped)
    np.testing.assert_array_equal(load.sent, [(choices[:, :k] == e).sum() for e in range(experts)])
    given_slots, end = np.asarray(slots.slot), experts // sharing * capacity
    used = given_slots[given_slots < end]
    assert len(set(used.tolist())) == len(used) == int(load.kept.sum() + load.spilled.sum())
    np.testing.assert_array_equal(np.sort(np.flatnonzero(np.asarray(slots.choice) < tokens * k)), np.sort(used))
    computed = np.where(given_slots < end, slots.expert, -1)
    np.testing.assert_array_equal(computed[computed >= 0] // sharing, used // capacity)
    np.testing.assert_array_equal(np.asarray(slots.place)[used], computed[computed >= 0] % sharing)
    assert (np.delete(np.asarray(slots.place), used) == sharing).all()
    for row, own in zip(choices, computed, strict=True):
        served = own[own >= 0].tolist()
        assert len(set(served)) == len(served)
        assert set(served) <= set(row.tolist())
    # a choice is dropped only if its expert's buffer, and that of each spare one of the token, is full
    full = np.repeat(np.bincount(used // capacity, minlength=experts // sharing) == capacity, sharing)
    for row, own in zip(choices, computed, strict=True):
        for j in range(k):
            if own[j] < 0 and row[j] < experts:
                assert full[row[j]]
                assert all(full[e] or e in own for e in row[k:])


def trained(kind, parallel, options, devices=None, batch=None, steps=STEPS):
    batch = batch_of() if batch is None else batch
    model = (
        jp.from_linen(kind(**options), batch["inputs"][:1])
        if issubclass(kind, nn.Module)
        else lambda rngs: kind(rngs, **options)
    )
    layout = jp.compose(model, parallel, devices)
    step = jp.train_step(layout, loss, OPTIMIZER)
    state, rows = jp.init_state(layout, OPTIMIZER, seed=0), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        rows.append(
            {
                name: float(value)
                for name, value in metrics.items()
                if name in ("loss", "sent", "kept", "spilled", "dropped")
            }
        )
    return rows, state, layout


CASES = [
    (Model, {"expert": 8}, {"capacity": 1.0}),
    (Model, {"expert": 4, "data": 2}, {"capacity": 1.0, "spare": 2}),
    (Model, {"expert": 2, "fsdp": 2, "data": 2}, {"capacity": None}),
    (Model, {"expert": 2, "fsdp": 4, "zero": 1}, {"capacity": 0.75, "spare": 3}),
    (Model, {"expert": 4, "fsdp": 2, "zero": 2}, {"capacity": 1.25}),
    (Model, {"expert": 4, "data": 2, "zero": 0}, {"capacity": 1.0, "spare": 1}),
    (Model, {"expert": 2, "tensor": 2, "fsdp": 2}, {"capacity": 1.0, "spare": 1}),
    (Model, {"expert": 2, "context": 2, "data": 2}, {"capacity": 1.1, "spare": 1}),
    (LinenModel, {"expert": 4, "data": 2}, {"capacity": 1.0, "spare": 2}),
]


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [case if case is CASES[1] else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda value: str(value) if isinstance(value, dict) else value.__name__,
)
def test_a_mixture_trains_as_on_one_device(kind, sizes, options):
    row = assert_trains_as_on_one_device(kind, sizes, options)
    assert options["capacity"] is None or row["kept"] < row["sent"]


def assert_trains_as_on_one_device(kind, sizes, options):
    """Compares losses, counts and parameters; returns the last step's counts."""
    paths = {"experts/(gate|up)": ("expert", "embed", "mlp"), "experts/down": ("expert", "mlp", "embed")}
    parallel = jp.Parallel(**sizes, paths=paths if kind is LinenModel else {})
    rows, state, layout = trained(kind, parallel, options)
    alone, expected, _ = trained(kind, jp.Parallel(), options, jax.devices()[:1])
    for row, other in zip(rows, alone, strict=True):
        assert row.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-5)
        assert row == other
    for (path, value), other in zip(
        jax.tree.leaves_with_path(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(np.asarray(value), np.asarray(other), atol=2e-5, err_msg=str(path))
    assert any("expert" in str(place.stored) for place in layout.placements.values())
    return rows[-1]
