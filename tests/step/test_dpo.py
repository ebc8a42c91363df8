"""DPO: the closed form, the same numbers on a cube as plain optax on one device, and a reference that costs nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import DIM, SEQ, VOCAB, Block, Staged, assert_same_arrays, models, named

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.sharding.names import Compute, leaves_by_path
from jaxpar.sharding.reference import PolicyAndReference
from jaxpar.step.preference_loss import answer_log_probs

PAIRS = 8
SIDES = "chosen", "rejected"
CUBE = jp.Parallel(data=2, fsdp=2, tensor=2)
ADAM = optax.adam(3e-3)
REWARDS = "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"


class Policy(nnx.Module):
    """Annotated, with a head that the loss may compute in chunks, and dropout that a reference does not have."""

    head_name = "head"

    def __init__(self, rngs, rate=0.0):
        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.block = Block(rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Param(named("embed", "vocab")(rngs.params(), (DIM, VOCAB)))

    def hidden(self, tokens):
        return self.dropout(self.block(self.embed(tokens)))

    def __call__(self, tokens):
        return self.hidden(tokens) @ self.head[...]


def make_policy():
    with nnx.use_eager_sharding(False):  # as there is no mesh
        return Policy(nnx.Rngs(0))


def pairs(seed, count=PAIRS):
    rng, batch = np.random.default_rng(seed), {}
    for side in SIDES:
        tokens = rng.integers(0, VOCAB, (count, SEQ + 1)).astype(np.int32)
        begins, ends = rng.integers(0, SEQ - 1, count), rng.integers(1, SEQ + 1, count)
        places = np.arange(SEQ)
        mask = (places >= begins[:, None]) & (places < np.maximum(ends, begins + 1)[:, None])
        batch |= {f"{side}_inputs": tokens[:, :-1], f"{side}_targets": tokens[:, 1:], f"{side}_mask": mask.astype("i4")}
    return batch


def closed_form(policy, reference, batch, beta, smoothing):
    """Equation 7 of arXiv:2305.18290 with cDPO's smoothing, in float64, of tables of logits [vocab, vocab]."""

    def log_prob(table, side, row):
        total = 0.0
        tokens = [batch[f"{side}_{name}"][row] for name in ("inputs", "targets", "mask")]
        for token, target, counts in zip(*tokens, strict=True):
            if counts:
                logits = table[token].astype(np.float64)
                total += logits[target] - np.log(np.exp(logits).sum())
        return total

    losses, rewards = [], []
    for row in range(len(batch["chosen_inputs"])):
        if not any(batch[f"{side}_mask"][row].any() for side in SIDES):
            continue
        chosen, rejected = (beta * (log_prob(policy, s, row) - log_prob(reference, s, row)) for s in SIDES)
        good, bad = np.log1p(np.exp(rejected - chosen)), np.log1p(np.exp(chosen - rejected))
        losses.append((1 - smoothing) * good + smoothing * bad)
        rewards.append([chosen, rejected, chosen - rejected, float(chosen > rejected)])
    return np.array([np.mean(losses), *np.mean(rewards, axis=0)]), len(losses)


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.1), (0.05, 0.5)])
def test_loss_and_rewards_are_the_closed_form(beta, smoothing):
    rng, batch = np.random.default_rng(0), pairs(1)
    batch["chosen_mask"][3] = batch["rejected_mask"][3] = 0  # a pair that does not count
    batch["chosen_targets"][batch["chosen_mask"] == 0] = -1  # which no vocabulary has
    policy, reference = (3 * rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) for _ in range(2))

    @jax.jit
    def run(policy, reference, batch):
        model = PolicyAndReference(lambda tokens: policy[tokens], lambda tokens: reference[tokens])
        return jp.dpo_loss(model, batch, beta=beta, label_smoothing=smoothing)

    sums = run(policy, reference, batch)
    want, counted = closed_form(policy, reference, batch, beta, smoothing)
    assert {float(count) for _, count in sums.values()} == {counted} == {PAIRS - 1}
    got = [float(sums[name][0]) / counted for name in ("loss", *REWARDS)]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def train(model, parallel, devices=None, *, optimizer=None, steps=3, **settings):
    optimizer = optimizer or jp.freeze(ADAM, ["reference"])
    layout = jp.compose(model, parallel, devices)
    state, rows = jp.init_state(layout, optimizer, seed=1), []
    step = jp.train_step(layout, partial(jp.dpo_loss, beta=0.5, **settings), optimizer, accumulate=1)
    for number in range(steps):
        state, metrics = step(state, pairs(number))
        rows.append([float(metrics[name]) for name in ("loss", *REWARDS[:3])])
    return np.array(rows), state, step


def log_prob(logits, targets, mask):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return jnp.sum(picked * mask, axis=1)


def plain(params):
    """Trains as one does without jaxpar: optax, two modules and `jax.grad` on one device."""
    graph, state, rest = nnx.split(make_policy(), nnx.Param, ...)
    start = params = jax.device_get(params)

    def call(params, tokens):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, rest)(tokens)

    def rewards(params, batch):
        return [
            0.5
            * (
                log_prob(call(params, batch[f"{s}_inputs"]), batch[f"{s}_targets"], batch[f"{s}_mask"])
                - log_prob(call(start, batch[f"{s}_inputs"]), batch[f"{s}_targets"], batch[f"{s}_mask"])
            )
            for s in SIDES
        ]

    def loss(params, batch):
        chosen, rejected = rewards(params, batch)
        values = [-jax.nn.log_sigmoid(chosen - rejected), chosen, rejected, chosen - rejected]
        return values[0].mean(), jnp.stack([value.mean() for value in values])

    opt_state, rows = ADAM.init(start), []
    for number in range(3):
        gradients, row = jax.jit(jax.grad(loss, has_aux=True))(params, jax.tree.map(jnp.asarray, pairs(number)))
        updates, opt_state = ADAM.update(gradients, opt_state)
        params = optax.apply_updates(params, updates)
        rows.append(row)
    return np.array(rows), params


@pytest.mark.nightly
def test_a_cube_trains_as_plain_optax_does_and_the_reference_keeps_its_bits():
    model = jp.add_reference(Policy)
    begun = jp.init_state(jp.compose(model, jp.Parallel(), jax.devices()[:1]), ADAM, seed=1).params
    start = {name: value for name, value in begun.items() if name != "reference"}
    want, params = plain(start)
    for settings in ({}, {"largest": 500}):  # whole logits, and in chunks
        rows, state, step = train(model, CUBE, **settings)
        assert ("chunks" in str(step.layout.notes)) == bool(settings)
        np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-5)
        trained = {name: value for name, value in state.params.items() if name != "reference"}
        assert_same_arrays(trained, params)
        for path, value in leaves_by_path(jax.device_get(state.params["reference"])).items():
            assert (value == leaves_by_path(start)[path]).all()


@pytest.mark.nightly
def test_a_reference_has_no_optimizer_state_and_is_sharded_as_the_model_is():
    layout = jp.compose(jp.add_reference(Policy), CUBE)
    optimizer = jp.freeze(ADAM, ["reference"])
    step = jp.train_step(layout, jp.dpo_loss, optimizer)
    bytes_of = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim)  # noqa: E731
    state = jp.init_state(layout, optimizer)
    assert bytes_of(state.params) == bytes_of(state.optimizer)  # two moments of half of the parameters
    copies = layout.blueprint.copies
    assert step.layout.frozen == set(copies)
    for copy, path in copies.items():
        assert layout.placements[copy].stored == layout.placements[path].stored
        assert layout.placements[copy].why.startswith(f"as {path}")
    gradients, _, _ = step.compute_gradients(state.params, state.model_state, pairs(0))
    moved = {path for path, leaf in leaves_by_path(gradients).items() if np.abs(leaf).max() > 0}
    assert moved == set(copies.values())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*each device computes")
@pytest.mark.parametrize("base", ["float", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_model_with_adapters_is_its_own_reference(base):
    adapted = jp.add_lora(Policy, rank=2, paths=["block/*"], base=base)
    model, optimizer = jp.add_reference(adapted), jp.freeze(optax.adam(0.03), ["*"], but=["adapters"])
    rows, state, step = train(model, CUBE, optimizer=optimizer)
    want, expected, _ = train(model, jp.Parallel(), jax.devices()[:1], optimizer=optimizer)
    np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-5)
    assert_same_arrays(state.params, expected.params)
    assert rows[0, 0] == pytest.approx(np.log(2), abs=1e-6)
    assert not step.layout.blueprint.copies
    assert set(step.layout.placements) == set(adapted.leaves)

    layout = jp.compose(Policy, jp.Parallel(), 1)
    _, rest = layout.blueprint.init(jax.random.key(0))
    before = jp.init_state(jp.compose(adapted, jp.Parallel(), jax.devices()[:1]), ADAM, seed=1)

    @jax.jit
    def merged_loss(*params):
        bind = lambda params: layout.blueprint.bind(params, rest, lambda _, x: x, Compute())  # noqa: E731
        both = PolicyAndReference(*(bind(jp.merge_lora(step.layout, each)) for each in params))
        return jp.dpo_loss(both, pairs(3), beta=0.5)["loss"][0] / PAIRS

    loss = merged_loss(jax.device_get(state.params), jax.device_get(before.params))
    _, metrics = step(state, pairs(3))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert abs(float(metrics["loss"]) - np.log(2)) > 3e-4


def test_a_reference_has_no_dropout():
    model = jp.add_reference(partial(Policy, rate=0.5))
    layout = jp.compose(model, jp.Parallel(), jax.devices()[:1])
    tokens = jnp.zeros((1, SEQ), jnp.int32)

    @jax.jit
    def run(key):
        bound = layout.blueprint.bind(*layout.blueprint.init(key), lambda _, x: x, Compute())
        return [call(tokens) for call in (bound.reference, bound.reference, bound.policy)]

    first, again, policy = run(jax.random.key(0))
    assert (first == again).all()
    assert (first != policy).any()


@pytest.mark.slow
def test_log_probabilities_in_chunks_have_the_gradients_of_whole_logits():
    batch, weights = pairs(0), jnp.arange(1.0, PAIRS + 1)
    arrays = [jnp.asarray(batch[f"chosen_{name}"]) for name in ("inputs", "targets", "mask")]
    graph, params, rest = nnx.split(make_policy(), nnx.Param, ...)

    def total(params, largest):
        return jnp.sum(weights * answer_log_probs(nnx.merge(graph, params, rest), *arrays, largest=largest))

    gradient = jax.jit(jax.value_and_grad(total), static_argnums=1)
    (want, to), (got, chunked) = (gradient(params, largest) for largest in (2**30, 600))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_same_arrays(nnx.to_pure_dict(chunked), nnx.to_pure_dict(to))


def refused(call):
    with pytest.raises(JaxparError) as caught:
        call()
    return str(caught.value)


def step_of(model, optimizer):
    return jp.train_step(jp.compose(model, jp.Parallel(), jax.devices()[:1]), jp.dpo_loss, optimizer)


@pytest.mark.slow
def test_what_a_reference_does_not_compose_with_is_refused_in_words():
    model = jp.add_reference(Policy)
    assert 'jp.freeze(optimizer, ["reference"])' in refused(lambda: step_of(model, ADAM))
    adapted = jp.add_reference(jp.add_lora(Policy, rank=2, paths=["block/*"]))
    assert "shares with its reference" in refused(lambda: step_of(adapted, ADAM))
    partly = jp.add_reference(Policy, trained=["block"])
    assert "embed" in refused(lambda: step_of(partly, jp.freeze(ADAM, ["reference"])))
    step_of(partly, jp.freeze(ADAM, ["reference", "embed", "head"]))
    assert "pipe=2 with a reference" in refused(lambda: jp.compose(jp.add_reference(Staged), jp.Parallel(pipe=2), 2))
    assert "BatchNorm" in refused(lambda: jp.add_reference(models()["bare"]))
    assert "one reference" in refused(lambda: jp.add_reference(model))
    assert "'blok' matches nothing" in refused(lambda: jp.add_reference(Policy, trained=["blok"]))
    batch, arrays = pairs(0), PolicyAndReference(make_policy(), make_policy())
    assert "has no reference" in refused(lambda: jp.dpo_loss(arrays.policy, batch))
    assert "without rejected_mask" in refused(lambda: jp.dpo_loss(arrays, {k: batch[k] for k in [*batch][:-1]}))
    short = batch | {"rejected_mask": batch["rejected_mask"][:, 1:]}
    assert "[8, 7]" in refused(lambda: jp.dpo_loss(arrays, short))
    assert "label_smoothing" in refused(lambda: jp.dpo_loss(arrays, batch, label_smoothing=0.6))
