"""Models of every trade as their authors write them: on every layout each trains as a plain loop of optax does.

SOME    in every run: a model
ONCE    marked slow beyond those: most models once
EVERY   marked full beyond ONCE: models x layouts
"""

import itertools
import warnings
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from layouts import LAYOUTS, kept_bytes, on_device
from published import EXAMPLES
from published.generative import GAN, PLAYERS, discriminator_loss, generator_loss, players
from published.plain import STEPS, in_turns, plainly
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError

# few of them name the dim that `sequence` splits, and are told so
pytestmark = pytest.mark.filterwarnings("ignore:sequence=True, but")
# what devices do for each other, and say at the first step; but one, under `sequence` alone
REPEATED = {
    "vit": "act_len, which big_vision names in mlps too, has tensor, also of a head of one token: 1.30 times its share",
    "normed": "the norm of a matrix by power iteration, which is of no example: 1.09 times its share on data 8",
    "gemma": "two heads of keys over tensor 4: 1.22 times its share",
    "qwen3": "two heads of keys over tensor 4: 1.21 times its share",
}
EVERY = list(itertools.product(EXAMPLES, LAYOUTS))
RARELY = "normed", "sentiment", "word2vec", "tied", "seq2seq"  # of which one is trained below
CHOSEN = ["ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "tp+sp", "2x2x2 zero0", None, "2x2x2 zero2"]
# small models take the layouts of those that take long
MOVED = {"mixtral": "zero2", "qwen3": "2x2x2 zero3", "bridged": "2x2x2 zero0", "gcn": "2x2x2 zero2"}
LONG = "unet", "dit", "gemma", "nanogpt", "maxtext", "wmt"
ONCE = [
    (name, MOVED.get(name, layout))
    for name, layout in zip(EXAMPLES, itertools.chain(CHOSEN, itertools.repeat("tp+sp")), strict=False)
    if name not in RARELY + LONG
]
SOME = [case for case in ONCE if case[0] == "dqn"]


def case_of(case):
    rarely = [] if case in SOME else [pytest.mark.slow if case in ONCE else pytest.mark.full]
    # a model stays in one worker of pytest-xdist, which runs its plain loop once
    return pytest.param(*case, id=", ".join(case), marks=[pytest.mark.xdist_group(case[0]), *rarely])


def train(name, parallel, **numerics):
    """Returns the layout, the losses of some steps on one batch, and the state after them."""
    example = EXAMPLES[name]
    layout = jp.compose(example.model, replace(parallel, rules=example.rules))
    state = jp.init_state(layout, example.optimizer)
    step = jp.train_step(layout, example.loss, example.optimizer, **numerics)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, example.numbers())
        losses.append(float(metrics["loss"]))
    return layout, losses, state


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "layout"), [case_of(case) for case in EVERY])
def test_a_published_model_trains_as_a_plain_loop_does(name, layout):
    expected, params, rest = plainly(name)
    with warnings.catch_warnings():
        if name in REPEATED and (LAYOUTS[layout].sequence or name == "normed"):
            warnings.filterwarnings("ignore", message=".*times its share")
        placed, losses, state = train(name, LAYOUTS[layout])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(named((state.params, state.model_state)), named((params, rest)))
    assert on_device(state.params) == kept_bytes(placed)
    assert_even(state)


FOUND = {"mnist": pytest.mark.slow, "graph net": pytest.mark.slow, "gcn": pytest.mark.slow, "tied": pytest.mark.slow}


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=FOUND.get(name, pytest.mark.full))
        for name in EXAMPLES
        if name not in ("normed", "explicit")
    ],
)
def test_a_published_model_is_cut_into_stages_as_it_is(name):
    """Four stages that are found in its trace, beside one device that runs the same microbatches."""
    example, microbatches, results = EXAMPLES[name], 4, []
    stages = jp.Pipeline(stages="found", schedule="1f1b", microbatches=microbatches)
    for parallel, options in (
        (jp.Parallel(pipe=4, pipeline=stages), {}),
        (jp.Parallel(), {"accumulate": microbatches}),
    ):
        layout = jp.compose(example.model, replace(parallel, rules=example.rules), jax.devices()[: parallel.pipe])
        optimizer = optax.sgd(0.05)  # Adam would move what has no gradient by rounding errors
        step, state = jp.train_step(layout, example.loss, optimizer, **options), jp.init_state(layout, optimizer)
        losses = []
        for _ in range(2):
            state, metrics = step(state, example.numbers())
            losses.append(float(metrics["loss"]))
        results.append((losses, named((state.params, state.model_state))))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    assert_same_arrays(results[0][1], results[1][1])


def named(tree):
    """Returns the arrays by path: a name of Linen's may have a "/", which leads one deeper in jaxpar's tree."""
    return {"/".join(str(getattr(key, "key", key)) for key in path): x for path, x in jax.tree.leaves_with_path(tree)}


def assert_even(state):
    """Every device holds as much as any other."""
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves((state.params, state.optimizer, state.model_state)):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert max(held.values()) <= 1.01 * min(held.values())


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in EXAMPLES])
def test_a_pipeline_of_a_model_that_says_no_layers_is_refused(name):
    with pytest.raises(JaxparError, match=r"jp\.pipelined|cuts nothing"):
        train(name, jp.Parallel(pipe=2, data=4))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        pytest.param("mnist", {"remat": "full"}, marks=[pytest.mark.xdist_group("mnist"), pytest.mark.slow]),
        pytest.param("seq2seq", {"accumulate": 2}, marks=[pytest.mark.xdist_group("seq2seq"), pytest.mark.full]),
    ],
)
def test_remat_and_accumulation_change_nothing_in_a_published_model(name, numerics):
    """Of losses that draw no noise of their own, which is another for each microbatch."""
    expected, params, _ = plainly(name)
    _, losses, state = train(name, LAYOUTS["2x2x2 zero3"], **numerics)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(state.params, params)


@pytest.mark.full
def test_two_optimizers_take_turns_on_one_layout():
    """Each has a step and a state of its own, and hands parameters on to the other's."""
    layout, batch, frozen = jp.compose(GAN, LAYOUTS["zero3"]), EXAMPLES["gan"].numbers(), optax.set_to_zero()
    turns = [
        (discriminator_loss, optax.multi_transform(PLAYERS | {"generator": frozen}, players)),
        (generator_loss, optax.multi_transform(PLAYERS | {"discriminator": frozen}, players)),
    ]
    steps = [jp.train_step(layout, *turn) for turn in turns]
    states = [jp.init_state(layout, optimizer) for _, optimizer in turns]
    losses, last = [], states[0]
    for _ in range(STEPS):
        for turn, step in enumerate(steps):
            mine = replace(states[turn], params=last.params, model_state=last.model_state)
            states[turn], metrics = step(mine, batch)
            last = states[turn]
            losses.append(float(metrics["loss"]))
    expected, params, rest = in_turns(EXAMPLES["gan"], turns)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays((last.params, last.model_state), (params, rest))
