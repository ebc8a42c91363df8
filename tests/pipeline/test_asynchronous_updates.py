"""Updates in the middle of a table: each rule for which weights a microbatch sees equals a loop on one device.

    stash      a replay, microbatch by microbatch, at the weights that `stashing.versions` says
    vertical   SGD with gradients P - 1 updates late
    2bw        SGD with gradients 1 update late, of as many microbatches as there are stages
    none       none of these

A replay keeps every version; what it has of jaxpar's pipeline is a table of version numbers. Every step starts anew.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairwise import some
from tiny import Staged, assert_same_arrays, batches, token_loss
from weight_versions import pipedream, versions

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.pipeline.run.asynchronous import history, plan_versions
from jaxpar.pipeline.run.tick_program import COLUMNS, program
from jaxpar.pipeline.tables.library import schedule
from jaxpar.sharding.names import Compute, format_path

pytestmark = pytest.mark.xdist_group("asynchronous")  # what is compiled is shared
MICROBATCHES, STEPS, RATE, EXACT = 8, 3, 0.1, 1e-6
CHAINS = {  # with rates at which rounding stays rounding for 24 updates
    "sgd": optax.sgd(RATE),
    "momentum": optax.sgd(0.02, momentum=0.9, nesterov=True),
    "adamw": optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(5e-3, eps=1e-3, weight_decay=1e-2)),
    "free": optax.contrib.schedule_free_sgd(0.02),
}
MESHES = {
    "pipe 2": {"pipe": 2},
    "pipe 4": {"pipe": 4},
    "pipe 4 x data 2": {"pipe": 4, "data": 2},
    "pipe 2 x data 2 x tensor 2": {"pipe": 2, "data": 2, "tensor": 2},
}


@cache
def model(rate=0.0):
    return partial(Staged, layers=4, tied=False, rate=rate)


@cache
def built(weights, mesh, keep="inputs", chain="sgd", name="1f1b", rate=0.0, fill=0.0, **numerics):
    """Returns a step and a first state."""
    pipeline = jp.Pipeline(schedule=name, microbatches=MICROBATCHES, keep=keep, weights=weights)
    parallel = jp.Parallel(**MESHES[mesh], pipeline=pipeline)
    layout = jp.compose(model(rate), parallel, jax.devices()[: np.prod([*MESHES[mesh].values()])])
    step = jp.train_step(layout, token_loss, CHAINS[chain], **numerics)
    step.gradients.fill = fill
    return step, jp.init_state(layout, CHAINS[chain], seed=1)


@cache
def trained(*args, **settings):
    """Returns (losses, state) after some steps."""
    step, state = built(*args, **settings)
    state, losses = jax.tree.map(jnp.copy, state), []
    for batch in batches(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


# --- on one device --------------------------------------------------------------------------------------------------


@cache
def first(chain, rate=0.0):
    """Returns the layout of one device and its first state."""
    layout = jp.compose(model(rate), jp.Parallel(), jax.devices()[:1])
    return layout, jp.init_state(layout, CHAINS[chain], seed=1)


@cache
def gradient(rate=0.0):
    """Returns (params, rest, microbatch) to (gradients of the sum, sum, count, rest)."""
    blueprint = first("sgd", rate)[0].blueprint

    def total(params, model_state, batch):
        bound = blueprint.bind(params, model_state, lambda path, value: value, Compute())
        loss, count = token_loss(bound, batch)["loss"]
        return loss, (count, blueprint.collect(bound))

    def run(params, model_state, batch):
        (loss, (count, model_state)), gradients = jax.value_and_grad(total, has_aux=True)(params, model_state, batch)
        return gradients, loss, count, model_state

    return jax.jit(run)


def microbatches(batch):
    return [{key: value[m::MICROBATCHES] for key, value in batch.items()} for m in range(MICROBATCHES)]


def piece(stage, stages, tree):
    """Returns what a stage has of a tree: its layers, the embedding on the first, the head on the last."""

    def own(keys, x):
        path, layers = format_path(keys), x.shape[:1]
        if x.ndim == 0:
            return x
        if "blocks" in path:
            each = layers[0] // stages
            return x[stage * each : (stage + 1) * each]
        return x if stage == (0 if "embed" in path else stages - 1) else x[:0]

    return jax.tree_util.tree_map_with_path(own, tree)


def joined(pieces):
    """Returns the whole tree that was taken to pieces."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs) if xs[0].ndim else xs[0], *pieces)


def replayed(seen, stages, chain, rate=0.0):
    """Returns (losses, params, optimizer state) of one device that takes the microbatches one by one.

    Args:
      seen: (stage, microbatch) to the number of updates in the weights it uses.
      stages: How many pieces the model has; each has its own optimizer, and so its own global norm.
      chain: Of CHAINS.
      rate: Of dropout.
    """
    _, start = first(chain, rate)
    model_state, losses = start.model_state, []
    whole = [piece(stage, stages, start.params) for stage in range(stages)]
    states = [piece(stage, stages, start.optimizer) for stage in range(stages)]

    of = gradient(rate)

    @jax.jit
    def update(used, model_state, each, states, newest):
        gradients, loss, count, model_state = of(joined(used), model_state, each)
        moved = []
        for stage in range(stages):
            own = piece(stage, stages, jax.tree.map(lambda g: g / count, gradients))
            updates, state = CHAINS[chain].update(own, states[stage], newest[stage])
            moved.append((optax.apply_updates(newest[stage], updates), state))
        return [w for w, _ in moved], [state for _, state in moved], model_state, loss, count

    for batch in batches(STEPS):
        kept, sums = [whole], np.zeros(2)
        for m, each in enumerate(microbatches(batch)):
            used = [kept[seen[stage, m]][stage] for stage in range(stages)]
            whole, states, model_state, loss, count = update(used, model_state, each, states, kept[-1])
            kept.append(whole)
            sums += float(loss), float(count)
        losses.append(sums[0] / sums[1])
    return np.array(losses), joined(whole), joined(states)


def late_sgd(late, per_update=1):
    """Returns (losses, params) of w(t+1) = w(t) - rate x gradient of batch t at w(max(0, t - late))."""
    params, model_state = first("sgd")[1].params, first("sgd")[1].model_state
    losses = []
    for batch in batches(STEPS):
        w, sums, pieces = [params], np.zeros(2), microbatches(batch)
        for t in range(MICROBATCHES // per_update):
            parts = [
                gradient()(w[max(0, t - late)], model_state, each)
                for each in pieces[t * per_update : (t + 1) * per_update]
            ]
            counts = sum(count for _, _, count, _ in parts)
            total = jax.tree.map(lambda *g: sum(g), *(gradients for gradients, *_ in parts))
            w.append(jax.tree.map(lambda w, g, c=counts: w - RATE * (g / c), w[t], total))
            sums += np.sum([(float(loss), float(count)) for _, loss, count, _ in parts], 0)
        params = w[-1]
        losses.append(sums[0] / sums[1])
    return np.array(losses), params


def assert_equals(got, want):
    losses, state = got
    np.testing.assert_allclose(losses, want[0], rtol=EXACT)
    assert_same_arrays(state.params, want[1], EXACT)
    if len(want) > 2:
        assert_same_arrays(state.optimizer, want[2], EXACT)


# --- which function is trained --------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "keep", "chain", "rate"),
    [
        pytest.param("pipe 2", "inputs", "momentum", 0.2, marks=pytest.mark.full),
        pytest.param("pipe 4", "residuals", "adamw", 0.0, marks=pytest.mark.full),
        ("pipe 4 x data 2", "inputs", "adamw", 0.0),
        pytest.param("pipe 2 x data 2 x tensor 2", "residuals", "sgd", 0.0, marks=pytest.mark.full),
    ],
)
def test_stashing_equals_a_replay_at_the_weights_it_recorded(mesh, keep, chain, rate):
    """Losses, parameters and optimizer states, with a mask that counts other tokens in each microbatch and replica."""
    stages = MESHES[mesh]["pipe"]
    seen = {at: each.backward for at, each in versions(pipedream(stages, MICROBATCHES), "stash").items()}
    assert_equals(trained("stash", mesh, keep, chain, rate=rate), replayed(seen, stages, chain, rate))


@pytest.mark.nightly
def test_schedule_free_averages_over_updates_while_its_rate_counts_steps():
    seen = {at: each.backward for at, each in versions(pipedream(2, MICROBATCHES), "stash").items()}
    losses, state = trained("stash", "pipe 2", chain="free")
    wanted, params, held = replayed(seen, 2, "free")
    np.testing.assert_allclose(losses, wanted, rtol=EXACT)
    assert_same_arrays(state.eval_params, optax.contrib.schedule_free_eval_params(held, params), EXACT)
    assert int(state.optimizer.step_count) == 1 + STEPS
    assert float(state.optimizer.weight_sum) == pytest.approx(STEPS * MICROBATCHES * 0.02**2)


@pytest.mark.nightly
@pytest.mark.parametrize(("mesh", "keep"), [("pipe 4", "inputs"), ("pipe 2", "residuals")])
def test_vertical_sync_is_sgd_with_gradients_as_late_as_the_pipeline_is_deep(mesh, keep):
    assert_equals(trained("vertical", mesh, keep), late_sgd(MESHES[mesh]["pipe"] - 1))


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("mesh", "keep"), some([("pipe 4 x data 2", "residuals"), ("pipe 2", "inputs")], [], [("pipe 2", "inputs")])
)
def test_two_buffers_are_sgd_with_gradients_one_update_late(mesh, keep):
    assert_equals(trained("2bw", mesh, keep), late_sgd(1, per_update=MESHES[mesh]["pipe"]))


@pytest.mark.nightly
def test_without_stashing_it_is_none_of_these():
    """With the same data, rate and start; the rules differ from each other, too."""
    seen = {at: each.backward for at, each in versions(pipedream(4, MICROBATCHES), "stash").items()}
    wanted = [replayed(seen, 4, "sgd")[1], late_sgd(3)[1], late_sgd(1, per_update=4)[1], late_sgd(0)[1]]
    assert min(furthest(trained("none", "pipe 4")[1].params, each) for each in wanted) > 1e-3
    assert min(furthest(a, b) for i, a in enumerate(wanted) for b in wanted[:i]) > 1e-3


def furthest(tree, other):
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), jax.device_get(tree), jax.device_get(other))
    return max(jax.tree.leaves(apart))


@pytest.mark.nightly
def test_phased_stages_keep_older_weights_and_equal_a_replay_too():
    table = schedule("1f1b_phased", stages=2, microbatches=MICROBATCHES)
    seen = {at: each.backward for at, each in versions(table, "stash").items()}
    assert max(each.now - each.backward for each in versions(table, "stash").values()) == 2  # 1 in 1f1b
    assert_equals(trained("stash", "pipe 2", name="1f1b_phased"), replayed(seen, 2, "sgd"))


# --- which versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("weights", "keep"), [("stash", "stash"), ("vertical", "vertical"), ("none", "nothing")])
def test_a_plan_reads_the_versions_of_the_arithmetic(stages, weights, keep):
    table = pipedream(stages, 24)
    made, wanted = plan_versions(program(table), weights), versions(table, keep)
    for tick, stage, cell in table:
        seen = wanted[stage, cell.microbatch]
        assert column(made, "version")[tick, stage] == (seen.forward if cell.op == "F" else seen.backward)
        assert column(made, "update")[tick, stage] == (cell.op == "B")
    late = {"stash": [stages - 1 - d for d in range(stages)], "vertical": [stages - 1] * stages, "none": [0] * stages}
    for d in range(stages):
        assert max(seen.now - seen.backward for (at, _), seen in wanted.items() if at == d) == late[weights][d]
    assert (made.per_update, made.versions) == (1, max(late[weights]) + 1)
    assert history(table, weights).tolist() == [[wanted[d, m].backward for m in range(24)] for d in range(stages)]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_two_buffers_hold_the_versions_of_two_batches(stages):
    """All microbatches of a batch read what the batch before last left, forward and backward, on all stages."""
    table = pipedream(stages, 4 * stages)
    made = plan_versions(program(table), "2bw")
    for tick, stage, cell in table:
        batch, at = divmod(cell.microbatch, stages)
        assert column(made, "version")[tick, stage] == max(batch - 1, 0)
        assert column(made, "update")[tick, stage] == (cell.op == "B" and at == stages - 1)
    assert (made.per_update, made.versions) == (stages, 2)


def column(made, name):
    return made.program.rows[..., COLUMNS.index(name)]


# --- all the rest ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_what_buffers_hold_before_they_are_written_leaves_no_trace():
    """Bit for bit: masked work on what was never written is thrown away, `nan` or not."""
    losses, state = trained("stash", "pipe 4", "residuals", "adamw")
    polluted, other = trained("stash", "pipe 4", "residuals", "adamw", fill=float("nan"))
    assert (polluted == losses).all()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), other, state)
    assert all(jax.tree.leaves(same))


@pytest.mark.nightly
def test_evaluation_sees_the_newest_weights():
    _, state = trained("stash", "pipe 4 x data 2", "inputs", "adamw")
    batch = next(batches(1))
    total, count = built("stash", "pipe 4 x data 2", "inputs", "adamw")[0].evaluate(state, batch)["loss"]
    params, model_state = jax.device_get(state.params), first("adamw")[1].model_state
    sums = [gradient()(params, model_state, each)[1:3] for each in microbatches(batch)]
    np.testing.assert_allclose((total, count), np.sum(sums, 0), rtol=EXACT)


def test_metrics_are_those_of_the_whole_batch_and_the_last_update():
    step, state = built("vertical", "pipe 4")
    (batch,) = batches(1)
    _, metrics = step(jax.tree.map(jnp.copy, state), batch)
    w, model_state = [first("sgd")[1].params], first("sgd")[1].model_state
    for t, each in enumerate(microbatches(batch)):
        gradients, _, count, _ = gradient()(w[max(0, t - 3)], model_state, each)
        w.append(jax.tree.map(lambda w, g, c=count: w - RATE * (g / c), w[t], gradients))
    assert float(metrics["tokens"]) == batch["mask"].sum()
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradients) / count, rtol=EXACT)


@pytest.mark.nightly
def test_bf16_multiplies_in_bf16_and_updates_in_float32():
    losses, state = trained("stash", "pipe 4 x data 2", "inputs", "adamw", precision="bf16")
    assert built("stash", "pipe 4 x data 2", "inputs", "adamw", precision="bf16")[0].compiler.matmuls.share == 1
    np.testing.assert_allclose(losses, trained("stash", "pipe 4 x data 2", "inputs", "adamw")[0], rtol=5e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}


# --- what is refused ------------------------------------------------------------------------------------------------


def weighted_by_the_model(model, batch):
    logits = model(batch["inputs"])
    return jnp.sum(jnp.square(logits)), jnp.sum(jax.nn.softmax(logits)[..., 0])


REFUSED = {
    "several chunks": ({"schedule": "interleaved"}, "weights='stash' with schedule interleaved"),
    "split backwards": ({"schedule": "zb_h1"}, "weights='stash' with schedule zb_h1"),
    "a tied embedding": ({"tied": True}, "embed/embedding is read before the layers and after them"),
    "fsdp": ({"fsdp": 2}, "weights='stash' with fsdp=2"),
    "uneven stages": ({"layers": (3, 1)}, r"weights='stash' with layers=\(3, 1\)"),
    "part of an update": ({"weights": "2bw", "microbatches": 5}, "weights='2bw' with microbatches=5 on pipe=2"),
    "too early for old weights": (
        {"pipe": 4, "schedule": "1f1b_phased", "weights": "2bw"}, "F8 needs 1 updates, 0 made",
    ),
    "a count of the model's": ({"loss": weighted_by_the_model}, "a loss whose count follows from what the model"),
}  # fmt: skip


def try_to_train(*, pipe=2, fsdp=1, tied=False, loss=token_loss, **pipeline):
    given = {"schedule": "1f1b", "weights": "stash", "microbatches": 2 * MICROBATCHES} | pipeline
    parallel = jp.Parallel(pipe=pipe, fsdp=fsdp, pipeline=jp.Pipeline(**given))
    layout = jp.compose(partial(Staged, layers=4, tied=tied), parallel, jax.devices()[: pipe * fsdp])
    step, state = jp.train_step(layout, loss, CHAINS["sgd"]), jp.init_state(layout, CHAINS["sgd"])
    step(state, next(batches(1)))


@pytest.mark.parametrize("case", some(REFUSED, ["fsdp", "uneven stages", "part of an update"]))
def test_what_cannot_be_trained_so_is_refused_in_one_message(case):
    given, got = REFUSED[case]
    with pytest.raises(JaxparError, match=got) as error:
        try_to_train(**given)
    assert len(error.value.problems) == 1
