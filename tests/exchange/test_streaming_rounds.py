"""A round of streaming: a fragment travels while the replicas go on, in one program."""

import jax
import numpy as np
import pytest
from test_seams_exchange import CHAIN, batch, composed, loss
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.hlo.replica_groups import attribute_text, axes_of_groups, parse_groups
from jaxpar.hlo.text import parse
from jaxpar.hlo.trip_counts import trip_count
from jaxpar.inspector.compiled import compile_program
from jaxpar.step.per_replica.streaming_rounds import Round

STREAMING = jp.Exchange("streaming", every=6, fragments=2, delay=2)
WHOLE = {"data": 4, "fsdp": 2}


def stepping(sizes, exchange=STREAMING, devices=None, **settings):
    return jp.train_step(composed(sizes, exchange, devices), loss, CHAIN, **settings)


@pytest.mark.nightly
def test_a_round_makes_what_its_steps_make():
    """Of eight steps: two fragments, sent after the third and the sixth, and applied two steps later."""
    step = stepping(WHOLE)
    state, losses, one = jp.init_state(step.layout, CHAIN), [], Round(step)
    while len(losses) < 8:
        if one.is_first_step(len(losses) + 1):
            state, found = one(state, [batch(len(losses) + i) for i in range(one.steps)])
        else:
            state, found = step(state, batch(len(losses)))
            found = [found]
        losses += [float(each["loss"]) for each in found]
    want, expected = jp.init_state(step.layout, CHAIN), []
    for i in range(8):
        want, metrics = step(want, batch(i))
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(state, want)
    assert int(state.step) == 8


def scheduled(step, first=3):
    """The all-reduce between replicas and the loop of steps in a round as compiled: places of start, loop and done."""
    shapes = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in batch(0).items()}
    one = Round(step)
    lowered = one.lower(step.abstract(), [shapes] * one.steps, first=first)
    text = compile_program(lowered, list(step.layout.device_mesh.devices.flat), compiler_options=one.options).text
    module, sizes = parse(text), dict(step.layout.device_mesh.shape)

    def travels(op):
        if op.opcode not in ("all-reduce", "all-reduce-start"):
            return False
        return "data" in axes_of_groups(parse_groups(attribute_text(op.attributes, "replica_groups"), 16), sizes)

    ops = module.computations[module.entry]
    (start,) = [place for place, op in enumerate(ops) if travels(op)]
    assert [op.name for _, op in module.ops() if travels(op)] == [ops[start].name]  # none in the loop
    done = [i for i, op in enumerate(ops) if op.opcode == "all-reduce-done" and ops[start].name in op.operands]
    loops = [i for i, op in enumerate(ops) if op.opcode == "while" and trip_count(op) == one.exchange.delay]
    return ops[start].opcode, start, loops, done


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"data": 2, "fsdp": 8}, marks=pytest.mark.slow), pytest.param({"data": 16}, marks=pytest.mark.full)],
    ids=str,
)
def test_a_fragment_is_on_its_way_while_all_steps_of_the_delay_are_made(sizes):
    """As compiled for two nodes of H100s: it starts before the loop of these steps, and is done after it.

    Inside of the loop nothing travels between replicas; gathers of parameters over fsdp do.
    """
    opcode, start, loops, done = scheduled(stepping(sizes, devices=jp.target_devices("h100:2x8")))
    assert opcode == "all-reduce-start"
    assert len(loops) == len(done) == 1
    assert start < loops[0] < done[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Round(stepping(WHOLE, jp.Exchange("diloco"))), "a round with exchange diloco every 20 steps"),
        (lambda: Round(stepping(WHOLE, guard=True)), "and a guard"),
        (lambda: Round(stepping(WHOLE, jp.Exchange("streaming", every=4, fragments=2, delay=2))), "delay = 1"),
        (lambda: Round(stepping(WHOLE, jp.Exchange("streaming", every=4, fragments=2, delay=1, wire="int8"))), "fp32"),
        (lambda: Round(stepping(WHOLE)).lower(None, [batch(0)] * 3, first=4), "a round of 3 batches from step 4"),
        (lambda: Round(stepping(WHOLE)).lower(None, [batch(0)] * 2, first=3), "a round of 2 batches from step 3"),
    ],
    ids=["diloco", "guard", "two on their way", "a code", "no fragment", "a batch too few"],
)
def test_what_is_no_round_is_refused(make, said):
    with pytest.raises(JaxparError) as caught:
        make()
    assert said in str(caught.value)
