"""Optimizers and schedules of optax by any name, and the user's own: optax's programs, tried on shapes before a run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import assert_same_arrays, models, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.job.build import rates
from jaxpar.job.check import check
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.models import resolve_model
from jaxpar.job.parts.optimizers import check_optimizer, custom_functions, note_optimizer, resolve_optimizer
from jaxpar.job.parts.plan_model import needs_jax, planner_model
from jaxpar.optim import optax_chain
from jaxpar.optim.optax_lookup import LOSS, needs_loss, optimizers, schedules
from jaxpar.optim.optimizer import SETTINGS, Optimizer, RateSchedule
from jaxpar.optim.step_inputs import rate_follows_steps, update
from jaxpar.optim.wrappers import check_optimizer_type
from jaxpar.parallel.compose import as_blueprint, compose
from jaxpar.sharding.names import leaves_by_path, nest
from jaxpar.step.losses import next_token_loss

SHAPES = {"matrix": (3, 4), "vector": (4,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
MATRICES = {"matrix": True, "vector": False}
STEPS = 10
NUMBERS = {"optimistic_adam", "polyak_sgd", "rprop", "sm3"}  # take a learning rate that is a number, and no schedule
NEEDED = {"noisy_sgd": {"key": 0}}
DECODER = "mesh.simulate = 1\n[model]\nname = 'decoder'\nlayers = 1\ndim = 16\nheads = 2\n"


def program(optimizer):
    """Returns what an update computes, as text."""
    return str(jax.make_jaxpr(partial(update, optimizer))(PARAMS, jax.eval_shape(optimizer.init, PARAMS), PARAMS, LOSS))


def job(text):
    return loads(f"{DECODER}\n[train]\nsteps = {STEPS}\n[optimizer]\n{text}")


def message(text):
    with pytest.raises(JaxparError) as refused:
        check_optimizer(job(text), PARAMS)
    return str(refused.value)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*optimistic_adam")  # for its successor
def test_an_optimizer_of_optax_is_optaxs_own_program_at_the_jobs_rate():
    rate = optax.cosine_decay_schedule(1e-3, STEPS, alpha=0.1)
    for name in optimizers().keys() - SETTINGS.keys() - NUMBERS:
        more = NEEDED.get(name, {})
        wanted = optax.chain(optax.clip_by_global_norm(1.0), optimizers()[name](rate, **more))
        assert program(optax_chain.build(Optimizer(name=name, arguments=more), STEPS)) == program(wanted), name
    for name in NUMBERS:
        made = Optimizer(name=name, decay="constant", learning_rate=0.5, clip=0)
        assert program(optax_chain.build(made, STEPS)) == program(optimizers()[name](0.5))


OURS = {
    "adamw": ({"eps": 1e-3}, lambda rate, each: optax.adamw(rate, 0.9, 0.95, weight_decay=0.1, mask=MATRICES, **each)),
    "adam": ({"nesterov": True}, lambda rate, each: optax.adam(rate, 0.9, 0.95, **each)),
    "sgd": ({"nesterov": True}, lambda rate, each: optax.sgd(rate, 0.9, **each)),
    "lion": ({"mu_dtype": "bfloat16"}, lambda rate, each: optax.lion(rate, 0.9, 0.95, weight_decay=0.1, mask=MATRICES,
                                                                     **each)),
    "lamb": ({"eps": 1e-3}, lambda rate, each: optax.lamb(rate, 0.9, 0.95, weight_decay=0.1, mask=MATRICES, **each)),
    "lars": ({"eps": 1e-3}, lambda rate, each: optax.lars(rate, 0.1, weight_decay_mask=MATRICES, momentum=0.9,
                                                                     trust_ratio_mask=MATRICES, **each)),
    "adafactor": ({"min_dim_size_to_factor": 2}, lambda rate, each: optax.adafactor(rate, weight_decay_rate=0.1,
                                                                                    **each)),
    "muon": ({"ns_steps": 2}, lambda rate, each: optax.contrib.muon(rate, weight_decay=0.1, **each)),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_further_arguments_stand_beside_the_settings(name):
    arguments, wanted = OURS[name]
    decay = 0.0 if name in ("adam", "sgd") else 0.1
    plain, more = (
        Optimizer(name=name, weight_decay=decay, decay="constant", learning_rate=0.5, clip=0, arguments=each)
        for each in ({}, arguments)
    )
    rate = optax.constant_schedule(0.5)
    assert program(optax_chain.build(plain, STEPS)) == program(wanted(rate, {}))
    assert program(optax_chain.build(more, STEPS)) == program(wanted(rate, arguments)) != program(wanted(rate, {}))


def test_a_schedule_of_optax_begins_after_the_warm_up_at_the_rate_that_follows_the_batch():
    text = """
    learning_rate = 0.01
    warmup = 4
    reference_batch = 16
    drops = [[10, 2]]
    schedule = { name = "piecewise_constant_schedule", arguments = { boundaries_and_scales = { 2 = 0.5 } } }
    """
    made = job(text)
    assert loads(dumps(made)) == made
    spec = made.optimizer.for_batch(32)
    rate = rates(spec, STEPS)
    assert [rate(step) for step in range(STEPS)] == pytest.approx([0, 0.01, *[0.02] * 2, 0.01, *[0.005] * 5])
    swept = optax_chain.schedule(spec, STEPS, learning_rate=jnp.float32(0.04))
    assert float(swept(2)) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("exponential_decay", {"transition_steps": 2, "decay_rate": 0.5}, optax.exponential_decay(3e-3, 2, 0.5)),
        ("cosine_onecycle_schedule", {"transition_steps": 9}, optax.cosine_onecycle_schedule(9, 3e-3)),
        (
            "warmup_cosine_decay_schedule", {"init_value": 1e-4, "warmup_steps": 2, "decay_steps": 9},
            optax.warmup_cosine_decay_schedule(1e-4, 3e-3, 2, 9),
        ),
        ("constant_schedule", {}, optax.constant_schedule(3e-3)),
    ],
)  # fmt: skip
def test_the_learning_rate_is_the_highest_value_of_a_schedule(name, arguments, wanted):
    made = Optimizer(name="sgd", learning_rate=3e-3, schedule=RateSchedule(name=name, arguments=arguments))
    text = lambda rate: str(jax.make_jaxpr(lambda count: jnp.asarray(rate(count)))(0))  # noqa: E731
    assert text(optax_chain.schedule(made, STEPS)) == text(wanted)
    assert name in schedules()


OWN = """
import jax.numpy as jnp, optax
from jaxpar.optim.eval_params import ema_params

def nadam(learning_rate, eps=1e-8):
    return optax.nadam(learning_rate, eps=eps)

def halved(learning_rate, steps, *, after):
    return lambda count: jnp.where(count < after * steps, learning_rate, learning_rate / 2)

def several(learning_rate): return optax.MultiSteps(optax.sgd(learning_rate), 2)
def by_loss(learning_rate): return optax.chain(optax.sgd(learning_rate), optax.scale_by_zoom_linesearch(3))
def plateau(learning_rate): return optax.chain(optax.sgd(learning_rate), optax.contrib.reduce_on_plateau())
def free(learning_rate): return optax.contrib.schedule_free(optax.sgd(learning_rate), learning_rate)
def twice(learning_rate): return optax.chain(free(learning_rate), ema_params(0.9))
def branches(learning_rate): return lambda count: learning_rate if count < 3 else 0.0
def lists(learning_rate): return lambda count: jnp.ones(2)
def constant(): return optax.sgd(0.1)
def by_path(learning_rate):
    def label(keys, leaf): return "embed" if "embed" in str(keys[0]) else "rest"
    labels = lambda params: __import__("jax").tree_util.tree_map_with_path(label, params)
    def both(params): assert params["embed"] is not None; return labels(params)
    return optax.multi_transform({"embed": optax.sgd(learning_rate), "rest": optax.adam(learning_rate)}, both)

def broken(learning_rate): raise ValueError("no such day")
number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, in the working directory."""
    (tmp_path / "my_optim.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_optim", raising=False)


@pytest.mark.nightly
def test_ones_own_functions_are_given_the_rate_their_arguments_and_the_steps(own):
    made = job("""
    name = "my_optim:nadam"
    arguments = { eps = 1e-3 }
    warmup = 2
    learning_rate = 0.1
    schedule = { name = "my_optim:halved", arguments = { after = 0.5 } }
    """)
    assert check(made) == []
    assert check(job('name = "my_optim:by_path"')) == []  # tried on the parameters of the model, and no others
    (problem,) = check(job('name = "my_optim:by_loss"'))
    assert "its update" in problem.got
    rate = rates(made.optimizer, STEPS, own=custom_functions(made))
    assert [rate(step) for step in range(STEPS)] == pytest.approx([0, 0.05, *[0.1] * 4, *[0.05] * 4])
    halved = lambda count: jnp.where(count < 0.5 * 8, 0.1, 0.1 / 2)  # noqa: E731
    whole = optax.join_schedules([optax.linear_schedule(0.0, 0.1, 2), halved], [2])
    wanted = optax.chain(optax.clip_by_global_norm(1.0), optax.nadam(whole, eps=1e-3))
    assert program(resolve_optimizer(made)) == program(wanted)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('name = "adagrd"', ['"adagrd"', "did you mean 'adagrad'?"]),
        ('name = "reduce_on_plateau"', ["no function", 'schedule = "reduce_on_plateau"']),
        ('name = "lbfgs"', ["no function"]),
        ('name = "schedule_free"', ["no other optimizer", '"schedule_free_adamw"']),
        ('schedule = { name = "reduce_on_plateau", arguments = { patient = 3 } }', ["did you mean 'patience'?"]),
        ('name = "dpsgd"', ["no per-example gradients"]),
        ('name = "rprop"', ["rprop", 'decay = "constant"']),
        ('name = "sm3"', ["sm3", 'decay = "constant"']),
        ('name = "adagrad"\nbeta1 = 0.5', ["optimizer.beta1 = 0.5 with adagrad", "[optimizer.arguments]"]),
        ('name = "adagrad"\narguments = { epz = 1 }', ["arguments.epz", "adagrad(learning_rate, initial_acc", "'eps'"]),
        ('name = "adagrad"\narguments = { eps = "x" }', ["adagrad", "eps"]),
        ('arguments = { b1 = 0.8, eps = 1e-6 }', ["optimizer.arguments.b1", "other keys"]),
        ('schedule = "exponential_decy"', ['schedule.name = "exponential_decy"', "'exponential_decay'"]),
        ('schedule = "exponential_decay"', ["without transition_steps", "without decay_rate", "(init_value, tran"]),
        ('schedule = { name = "constant_schedule", arguments = { value = 1.0 } }', ["arguments.value", "other keys"]),
        ('schedule = { arguments = { value = 1.0 } }', ["without a name"]),
        ('decay = "linear"\nschedule = "constant_schedule"', ['optimizer.decay = linear', "leave one of the two out"]),
        ('name = "my_optim:nadm"', ["no 'nadm'", "did you mean 'nadam'?"]),
        ('name = "my_optim:number"', ["is a int", "a function of learning_rate"]),
        ('name = "my_optim:constant"', ["constant()", "def make(learning_rate)"]),
        ('name = "my_optim:broken"', ["no such day", "line"]),
        ('name = "my_optim:by_loss"', ["its update", "no function"]),
        ('name = "my_optim:twice"', ["at most one part"]),
        ('schedule = "my_optim:branches"', ["my_optim:branches", "jnp.where"]),
        ('schedule = "my_optim:lists"', ["shape [2]", "one number"]),
        ('name = "optax:adagrad"', ["--allow-import"]),
    ],
)  # fmt: skip
def test_a_wrong_name_or_argument_is_refused_with_the_nearest_or_the_signature(own, text, parts):
    said = message(text)
    assert all(part in said for part in parts), said
    assert "\n  fix:  " in said


def test_what_is_wrong_with_an_optimizer_is_said_with_the_rest():
    wrong = loads(f'{DECODER}\n[train]\nfreeze = ["embed"]\nloss = "next"\n[optimizer]\nname = "adagrd"')
    assert [problem.got for problem in check(wrong)] == ["train.loss = 'next'", 'optimizer.name = "adagrd"']


ADAMW, SEVERAL = "optax.adamw(3e-4)", "optax.MultiSteps(...).gradient_transformation()"
NO_CHAINS = {
    "an optimizer's function": (optax.adam, "optax.adam(3e-4)"),
    "the class of several steps": (optax.MultiSteps, SEVERAL),
    "several steps": (optax.MultiSteps(optax.sgd(0.1), 2), SEVERAL),
    "a chain's function": (optax.chain, ADAMW),
    "clipping": (optax.clip_by_global_norm, ADAMW),
    "a loss": (optax.softmax_cross_entropy, ADAMW),
    "a schedule": (optax.cosine_decay_schedule, ADAMW),
    "injection": (optax.inject_hyperparams, ADAMW),
    "a line search": (optax.lbfgs, ADAMW),
    "a rate": (3e-4, ADAMW),
}


@pytest.mark.parametrize("case", NO_CHAINS)
def test_what_is_no_chain_is_refused_with_a_call_that_makes_one(case):
    optimizer, fix = NO_CHAINS[case]
    with pytest.raises(JaxparError) as caught:
        check_optimizer_type(optimizer, "optimizer=...")
    assert caught.value.problems[0].fix == fix


@pytest.mark.filterwarnings("ignore:Specifying a key:UserWarning")  # of noisy_sgd
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_the_call_that_is_named_for_an_optimizers_function_makes_a_chain():
    for name in optimizers().keys() & vars(optax).keys():
        with pytest.raises(JaxparError) as caught:
            check_optimizer_type(getattr(optax, name), "optimizer=...")
        fix = caught.value.problems[0].fix
        assert fix == f"optax.{name}(3e-4)"
        assert isinstance(eval(fix), optax.GradientTransformation)


def test_steps_of_many_updates_take_no_optimizer_that_counts_its_own():
    unflushed = "[parallel]\npipe = 2\n[parallel.pipeline]\nweights = 'stash'\n[optimizer]\nname = "
    with pytest.raises(JaxparError, match="counts them as steps"):
        check_optimizer(loads(f"{unflushed}'madgrad'"))
    check_optimizer(loads(f"{unflushed}'madgrad'\ndecay = 'constant'"))
    check_optimizer(loads(f"{unflushed}'adagrad'"))
    with pytest.raises(JaxparError, match="before the loss of its batch is known"):
        check_optimizer(loads(f"{unflushed}'sgd'\nschedule = 'reduce_on_plateau'"))


@pytest.mark.slow
def test_what_optimizers_ask_for_besides_gradients_is_in_their_program(own):
    plateau = job('learning_rate = 0.1\nclip = 0\nname = "sgd"\nschedule = { name = "reduce_on_plateau" }')
    flat = optax.chain(optax.sgd(optax.constant_schedule(0.1), momentum=0.9), optax.contrib.reduce_on_plateau())
    assert program(resolve_optimizer(plateau)) == program(flat)
    several = job('clip = 0\nname = "my_optim:several"')
    schedule = optax.cosine_decay_schedule(1e-3, STEPS, alpha=0.1)
    twice = optax.MultiSteps(optax.sgd(schedule), 2).gradient_transformation()
    assert program(resolve_optimizer(several)) == program(twice)
    told = {"my_optim:several": False, "my_optim:plateau": False, "momo": True, "adagrad": True, "my_optim:free": True}
    for name, is_told in told.items():
        made = job(f'name = "{name}"')
        assert check(made) == []
        assert rate_follows_steps(jax.eval_shape(resolve_optimizer(made).init, PARAMS)) == is_told
        assert needs_loss(resolve_optimizer(made)) == (name in ("my_optim:plateau", "momo"))


def plateaued(losses, **arguments):
    """Returns the scale of updates after these losses, by optax alone."""
    alone = optax.contrib.reduce_on_plateau(**arguments)
    state = alone.init({"x": jnp.zeros(())})
    for loss in losses:
        _, state = alone.update({"x": jnp.ones(())}, state, value=jnp.float32(loss))
    return float(state.scale)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "more"),
    [
        pytest.param("all_reduce", {}, marks=pytest.mark.full),
        pytest.param("sign", {"smallest": 512}, marks=pytest.mark.full),
        pytest.param("local", {}, marks=pytest.mark.slow),
    ],
)
def test_a_rate_follows_the_loss_of_the_whole_batch_or_of_each_replica(exchange, more):
    less = {"factor": 0.5, "patience": 1}
    made = optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(**less))
    parallel = jp.Parallel(data=2, fsdp=2, tensor=2, exchange=jp.Exchange(exchange, **more))
    losses, state, _ = train(models()["annotated"], parallel, chain=made, steps=6)
    scale = state.optimizer[1].scale
    if exchange == "local":  # replicas see losses of their own
        assert scale.shape == (2,)
        assert float(scale.min()) < 1
        return
    assert float(scale) == plateaued(losses, **less) < 1
    want, alone, _ = train(models()["annotated"], jp.Parallel(), jax.devices()[:1], chain=made, steps=6)
    if exchange == "all_reduce":
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        assert float(alone.optimizer[1].scale) == float(scale)


@pytest.mark.nightly
def test_several_steps_of_a_chain_make_one_update_on_a_cube_as_on_one_device():
    made = optax.MultiSteps(optax.adam(0.05, eps=1e-4), 2).gradient_transformation()
    cube = jp.Parallel(data=2, fsdp=2, tensor=2)
    losses, state, _ = train(models()["annotated"], cube, chain=made, steps=4)
    want, alone, _ = train(models()["annotated"], jp.Parallel(), jax.devices()[:1], chain=made, steps=4)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert int(state.optimizer.gradient_step) == int(alone.optimizer.gradient_step) == 2
    assert_same_arrays(state.params, alone.params)


@pytest.mark.nightly
def test_muon_makes_each_layers_matrices_orthogonal_and_leaves_vectors_tables_and_heads_to_adamw():
    decoder = "mesh.simulate = 1\n[model]\nname = 'decoder'\nlayers = 2\ndim = 8\nheads = 2\nuse_bias = true\n"
    optimizer = "[optimizer]\nname = 'muon'\nclip = 0\nlearning_rate = 1.0\ndecay = 'constant'"
    made = loads(f"{decoder}\n{optimizer}")
    assert check(made) == []
    leaves = as_blueprint(resolve_model(made, next_token_loss)).leaves
    rng = np.random.default_rng(0)
    flat = {path: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for path, leaf in leaves.items()}
    params = nest({tuple(path.split("/")): x for path, x in flat.items()})
    muon, alone = resolve_optimizer(made), optax.contrib.muon(1.0)
    orthogonal = {
        path.split("/mu/")[1]
        for path in leaves_by_path(jax.eval_shape(muon.init, params))
        if "muon/" in path and "/mu/" in path
    }
    assert orthogonal == {
        *(f"blocks/attention/{name}" for name in ("query", "key", "value", "out")),
        *(f"blocks/mlp/{name}" for name in ("up", "gate", "down")),
    }

    @jax.jit
    def updates(gradients):
        return leaves_by_path(muon.update(gradients, muon.init(gradients), gradients)[0])

    @jax.jit
    @jax.vmap
    def of_layer(one):
        return alone.update(one.reshape(8, 8), alone.init(one.reshape(8, 8)), one.reshape(8, 8))[0].reshape(one.shape)

    got = updates(params)
    for path in ("blocks/attention/query", "blocks/attention/out"):
        np.testing.assert_allclose(got[path], of_layer(flat[path]), rtol=1e-4, atol=1e-5)


def test_muon_says_what_it_leaves_to_adamw_and_is_refused_where_that_is_all():
    muon = "[optimizer]\nname = 'muon'\n"
    convolutions = f"mesh.simulate = 1\nmodel.name = 'resnet'\ndata.source = 'digits'\n{muon}[train]\nloss = 'classify'"

    def notes(text):
        made = loads(text)
        return note_optimizer(made, compose(resolve_model(made, next_token_loss), made.effective_parallel, 1)).notes

    (said,) = notes(convolutions)
    assert "muon: 1 of 25 parameters orthogonal, 24 updated by AdamW; " in said
    assert "because they have two dims, without names: head/kernel; " in said
    assert said.endswith("no dim names show which dims form a matrix: blocks/0/conv1/kernel and 8 more")
    (problem,) = check(loads(f"{convolutions}\nfreeze = ['head']"))  # all that is left has four dims, or one
    assert "muon: 0 of 23 parameters orthogonal" in problem.got
    assert notes(f"{DECODER}\n{muon}") == ("muon: 7 of 12 parameters orthogonal, 5 updated by AdamW",)
    assert notes(DECODER) == ()


def test_a_plan_counts_the_state_of_an_optimizer_that_has_no_formula():
    for text, size in (('name = "adagrad"', 4), ('arguments = { mu_dtype = "bfloat16" }', 6)):
        made = loads(f"train.precision = 'bf16'\n{DECODER}\n[optimizer]\n{text}")
        assert needs_jax(made)
        assert planner_model(made, 8).recipe.optimizer == pytest.approx(size, abs=0.01)
    assert not needs_jax(loads(DECODER))


@pytest.mark.full
def test_an_optimizer_of_the_whole_gradient_steps_over_devices_as_on_one():
    made = optax_chain.build(Optimizer(name="prodigy", learning_rate=1.0, decay="constant"), 3)
    cube = jp.Parallel(data=2, fsdp=2, tensor=2)
    losses, state, _ = train(models()["annotated"], cube, chain=made, steps=3)
    want, expected, _ = train(models()["annotated"], jp.Parallel(), jax.devices()[:1], chain=made, steps=3)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)
