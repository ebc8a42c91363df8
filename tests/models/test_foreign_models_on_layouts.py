"""Models that jaxpar's authors did not write, on layouts: equal to one device or refused, and no process is lost."""

from contextlib import nullcontext

import handwritten
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import grid
from outcomes import Combination, outcomes
from pairwise import some

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.hlo.branches import check_branches
from jaxpar.jaxprs.lookups import replicate_lookups
from jaxpar.mesh.target import missing_plugin
from jaxpar.pipeline.tables.library import schedule

PIECES = {"pipe": 2, "context": 2, "tensor": 2}
FOUR = {"microbatches": 4}


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("model", "sequence"), some([("transformer", False), ("looking", True)], [], [("looking", True)])
)
def test_any_model_looks_things_up_where_sequences_and_tables_are_in_pieces(model, sequence):
    """XLA ends the process on a gather between two axes inside of a pipeline; the models know nothing of it."""
    assert outcomes([Combination(model, "one-hot", PIECES | {"sequence": sequence}, FOUR)]) == ["equal"]


@pytest.mark.nightly
def test_a_lookup_per_row_beside_a_spread_head_is_refused():
    case = Combination("shifting", "looked up", {"pipe": 2, "data": 2, "context": 2}, FOUR | {"head": "spread"})
    (found,) = outcomes([case])
    assert found.startswith("refused: take_along_axis in Shifting or its loss")
    assert "as jp.next_token_loss does" in found
    assert "head='last'" in found


SPLIT = {"pipe": 2, "data": 2, "tensor": 2, "sequence": True}


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.full)])
def test_a_shift_of_tokens_in_a_mixed_table_is_refused_and_attention_is_not(schedule):
    """A shift becomes a message in a branch that the other stages do not take: it would wait for ever."""
    how = FOUR | {"schedule": schedule}
    cases = [Combination("shifting", "one-hot", SPLIT, how), Combination("transformer", "one-hot", SPLIT, how)]
    refused, found = outcomes(cases)
    assert refused.startswith("refused: a collective-permute in ")
    assert f"in an op that only some stages of {schedule} run in that tick" in refused
    assert 'schedule="1f1b_phased"' in refused
    assert found == "equal"


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_what_is_compiled_for_gpus_is_read_too():
    how = jp.Parallel(**SPLIT, pipeline=jp.Pipeline(schedule="1f1b", **FOUR))
    layout = jp.compose(handwritten.Shifting, how, jp.target_devices("h100:1x8"))
    (batch,) = handwritten.batches(1)
    with pytest.raises(JaxparError, match=r"a collective-permute in .* only some stages of 1f1b run in that tick"):
        jp.inspect(jp.train_step(layout, handwritten.one_hot, optax.sgd(0.1)), batch)


TOGETHER = 4  # combinations that share a process
EVERY = grid()


def groups(combinations):
    return [combinations[at : at + TOGETHER] for at in range(0, len(combinations), TOGETHER)]


SLOW = EVERY[2::64]
REST = [each for each in EVERY if each not in SLOW]
MARKED = [
    pytest.param(each, marks=mark)
    for some, mark in ((SLOW, pytest.mark.slow), (REST, pytest.mark.full))
    for each in groups(some)
]


@pytest.mark.spread(0)
@pytest.mark.parametrize("combinations", MARKED, ids=lambda each: str(each[0]))
def test_models_of_users_equal_one_device(combinations):
    """Or they are refused: a lookup per row, where XLA has none."""

    def want(each):
        looks_up = each.loss == "looked up" and each.sizes.keys() >= PIECES.keys()
        return "refused: take_along_axis" if looks_up else "equal"

    found = zip(combinations, outcomes(combinations), strict=True)
    assert {str(each): got for each, got in found if not got.startswith(want(each))} == {}


TABLE, IDS = jnp.linspace(0.0, 1.0, 24).reshape(8, 3), jnp.array([[1, 5], [7, 1]])


def deep(table, ids):
    """Lookups in a loop, in a branch, in what is computed again, and one that writes."""
    layer = jax.checkpoint(lambda x, _: (x + jax.lax.cond(x.sum() > 0, lambda: table[ids], lambda: x), None))
    x, _ = jax.lax.scan(layer, jnp.ones((2, 2, 3)), None, length=2)
    return table.at[ids].add(x)


@pytest.mark.slow
def test_all_lookups_are_found_wherever_they_stand_and_none_is_changed():
    seen = []

    def whole(x):
        seen.append(x.shape)
        return x

    run = replicate_lookups(deep, whole)
    np.testing.assert_array_equal(run(TABLE, IDS), deep(TABLE, IDS))
    assert seen == [(2, 2, 1), (2, 2, 3), (2, 2, 1), (2, 2, 3), (8, 3)]  # a gather, then a scatter
    want, got = (jax.grad(lambda table, made=made: made(table, IDS).sum())(TABLE) for made in (deep, run))
    np.testing.assert_array_equal(got, want)


def test_a_lookup_with_a_gradient_of_its_own_is_refused():
    @jax.custom_vjp
    def pick(table, ids):
        return table[ids]

    pick.defvjp(lambda table, ids: (table[ids], ids), lambda ids, g: (jnp.zeros((8, 3)).at[ids].add(g), None))
    with pytest.raises(JaxparError, match=r"a custom gradient.*\n.*\n.*out of that function"):
        replicate_lookups(pick, lambda x: x)(TABLE, IDS)


CHOSEN = """HloModule step, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%forward (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  ROOT %moved = f32[4]{{0}} {collective}, metadata={{op_name="pipeline:choice/cond/branch_1_fun/concatenate"}}
}}

%nothing (y: f32[4]) -> f32[4] {{
  ROOT %y = f32[4]{{0}} parameter(0)
}}

ENTRY %main (p: s32[], z: f32[4]) -> f32[4] {{
  %p = s32[] parameter(0)
  %z = f32[4]{{0}} parameter(1)
  ROOT %out = f32[4]{{0}} conditional(%p, %z, %z), branch_computations={{%nothing, %forward}}, \
metadata={{op_name="{choice}"}}
}}
"""
SIZES = {"pipe": 2, "data": 2, "tensor": 2}
COLLECTIVES = {  # of the devices 0 to 3 on the first stage and 4 to 7 on the second: whether all end
    "all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%sum": True,
    "all-reduce(%x), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum": False,
    "all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%sum": False,
    "all-to-all(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}": True,
    "collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{4,5}}": False,
    "negate(%x)": True,
}


@pytest.mark.parametrize(("collective", "ends"), COLLECTIVES.items())
@pytest.mark.parametrize("name", ["1f1b", "1f1b_phased"])
def test_in_what_a_stage_chose_only_its_own_devices_may_meet(collective, ends, name):
    table = schedule(name, stages=2, microbatches=4)
    inside = CHOSEN.format(collective=collective, choice="while/body/pipeline:choice/cond")
    with nullcontext() if ends or table.phased else pytest.raises(JaxparError, match="only some stages of 1f1b run"):
        check_branches(inside, SIZES, table)
    elsewhere = CHOSEN.format(collective=collective, choice="jit(step)/cond")  # all devices come to the same there
    check_branches(elsewhere, SIZES, table)
