"""A budget holds where it should and says what differs where it does not, on reports made by hand."""

import dataclasses

import pytest

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.hlo.flop import Flop
from jaxpar.inspector.memory_causes import Share
from jaxpar.inspector.report import Report
from jaxpar.mesh.chips import CHIPS
from jaxpar.mesh.collective import KINDS, Collective

MIB = 2**20
H100 = next(chip for chip in CHIPS if chip.key == "h100")


def sent(kind, *axes, times: int | None = 1, payload=MIB, **more):
    return Collective(kind=kind, axes=axes, dtype="f32", group=2, times=times, payload=payload, **more)


def report(*ledger, **more):
    given = {
        "title": "step", "devices": "8 x made by hand", "sizes": {"data": 2, "fsdp": 2, "tensor": 2}, "per_node": 8,
        "chip": None, "memory": (), "total": 0, "ledger": ledger, "flop": Flop(0, 0, 0, {}, False), "model_flop": None,
        "timeline": None, "flags": (), "arguments": (),
    }  # fmt: skip
    return Report(**given | more)


STEP = report(
    sent("all-reduce", "tensor", times=10, payload=4 * MIB, cause="blocks.mlp", source="model.py:7"),
    sent("all-reduce", "tensor", times=2, payload=4, cause="norm"),
    sent("all-gather", "fsdp", times=3, cause="embed or head"),
    sent("all-gather", "fsdp", times=3, payload=2 * MIB, cause="blocks.attention"),
    sent("reduce-scatter", "fsdp", times=6),
    sent("all-reduce", "data", "fsdp", times=1, payload=4),
)


def refused(error, *words, problems=1):
    """Asserts that an error says these words in so many problems, each with a rule and a fix."""
    assert len(error.value.problems) == problems, error.value
    assert all(problem.got and problem.rule and problem.fix for problem in error.value.problems)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in:\n{error.value}"


@pytest.mark.parametrize(
    "budget",
    [
        {},
        {"tensor": {"all-reduce": 12}},
        {"tensor": {"all-reduce": "40 MiB"}, "fsdp": {"all-gather": 6, "reduce-scatter": "6 MiB"}},
        {"fsdp": {"all-gather": "9 MiB", "reduce-scatter": 6, "all-reduce": 0}},
        {"data,fsdp": {"all-reduce": 1}},
        {"data": {}},
        {"data": dict.fromkeys(KINDS, 0)},
    ],
)
def test_a_budget_that_holds_is_silent(budget):
    jp.assert_collectives(STEP, budget, at_least=4 if "40 MiB" not in str(budget) else "1 KiB")


@pytest.mark.parametrize("count", [11, 13, 0])
def test_a_count_is_exact(count):
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, {"tensor": {"all-reduce": count}})
    refused(
        error,
        "all-reduce over tensor: 12 in a step",
        "10 x f32 4 MiB, blocks.mlp (model.py:7); 2 x f32 4 B, norm",
        f"the budget says {count}",
        "another sharding of these arrays, or another budget",
    )


def test_what_is_smaller_than_asked_for_is_not_looked_at():
    jp.assert_collectives(STEP, {"tensor": {"all-reduce": 10}}, at_least="1 KiB")
    jp.assert_collectives(STEP, {"tensor": {"all-reduce": 10}}, at_least=4 * MIB)
    jp.assert_collectives(STEP, {"tensor": {}}, at_least=4 * MIB + 1)


def test_a_size_is_the_most_that_a_step_may_send():
    jp.assert_collectives(STEP, {"fsdp": {"all-gather": "9 MiB", "reduce-scatter": "6 MiB"}})
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, {"fsdp": {"all-gather": "8.9 MiB", "reduce-scatter": 6}})
    refused(error, "all-gather over fsdp: 9 MiB in a step", "3 x f32 1 MiB, embed or head", "at most 8.9 MiB")


def test_a_kind_that_is_not_named_must_not_run():
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, {"fsdp": {"all-gather": 6}})
    refused(error, "reduce-scatter over fsdp: 6 in a step", "the budget says 0")


def test_what_is_asked_for_and_missing_is_said():
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, {"data": {"all-to-all": 4}})
    refused(error, "all-to-all over data: 0 in a step", "the budget says 4")


def test_a_collective_over_two_axes_is_neither_ones():
    jp.assert_collectives(STEP, {"data": {}, "data,fsdp": {"all-reduce": 1}})
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, {"data,fsdp": {}})
    refused(error, "all-reduce over data,fsdp: 1 in a step", "the budget says 0")


def test_everything_that_differs_is_said_at_once():
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, {"tensor": {"all-reduce": 1}, "fsdp": {"all-gather": "1 MiB"}, "data": {}})
    refused(error, "all-reduce over tensor", "all-gather over fsdp", "reduce-scatter over fsdp", problems=3)


@pytest.mark.parametrize("allowed", [0, 1, 10**9, "1 TiB"])
def test_what_runs_an_unknown_number_of_times_fits_no_budget(allowed):
    dynamic = report(sent("all-reduce", "data", times=None, cause="while: psum", source="model.py:9"))
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(dynamic, {"data": {"all-reduce": allowed}})
    refused(error, "all-reduce over data an unknown number of times: ? x f32 1 MiB, while: psum (model.py:9)",
            "counted", "a loop with a fixed length")  # fmt: skip


def test_an_unknown_number_of_what_is_too_small_does_not_matter():
    dynamic = report(sent("all-reduce", "data", times=None, payload=4))
    jp.assert_collectives(dynamic, {"data": {}}, at_least="1 KiB")


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (
            {"tensr": {}},
            ["axis 'tensr' in a budget", "an axis of the mesh: data, fsdp, tensor", "did you mean 'tensor'?"],
        ),
        ({"expert": {"all-to-all": 1}}, ["axis 'expert'", "an axis of the mesh: data, fsdp, tensor"]),
        ({"data,pipe": {}}, ["axis 'data,pipe'", "an axis of the mesh: data, fsdp, tensor"]),
        (
            {"data": {"allreduce": 1}},
            ["'allreduce' in a budget", "one of all-reduce, all-gather", "mean 'all-reduce'?"],
        ),
        ({"data": {"broadcast": 1}}, ["'broadcast' in a budget", "collective-permute"]),
        ({"fsdp": {"all-gather": "much"}}, ["'much' is no size", "KiB", '"64 MiB"']),
    ],
)
def test_a_budget_of_what_does_not_exist_is_refused(budget, words):
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, budget)
    refused(error, *words)


def test_a_size_to_begin_at_that_is_none_is_refused():
    with pytest.raises(JaxparError) as error:
        jp.assert_collectives(STEP, {}, at_least="1 KB ish")
    refused(error, "'1 KB ish' is no size", '"64 MiB"')


# ---- memory

CAPACITY = int(H100.visible_memory * 0.9) - 2**29  # JAX's pool without workspaces; the rest is the driver's and NCCL's
FULL = report(
    chip=H100,
    total=CAPACITY,
    memory=(
        Share("parameters", 20 * 2**30, "exact"),
        Share("activations", 40 * 2**30, "compiled"),
        Share("batch", 2**30, "exact"),
        Share("gradients", 10 * 2**30, "compiled"),
        Share("logits", 2**20, "compiled"),
    ),
)


def test_what_fills_a_device_fits_and_one_byte_more_does_not():
    jp.assert_fits(FULL)
    with pytest.raises(JaxparError) as error:
        jp.assert_fits(dataclasses.replace(FULL, total=CAPACITY + 1))
    refused(
        error,
        "step needs 70.7 GiB per device: activations 40 GiB, parameters 20 GiB, gradients 10 GiB, batch 1 GiB",
        "70.7 GiB of the NVIDIA H100 SXM's 79.11 GiB are for a program: a run takes 0.9 of it",
        "remat, more microbatches, a higher zero, or more devices",
    )


def test_what_would_free_memory_is_the_fix():
    knobs = (("remat = 'full'", 30 * 2**30), ("zero = 3", 2**30), ("microbatches = 4", 2**20), ("zero = 2", 1))
    with pytest.raises(JaxparError) as error:
        jp.assert_fits(dataclasses.replace(FULL, total=CAPACITY + 1, knobs=knobs))
    refused(error, "remat = 'full' frees 30 GiB; zero = 3 frees 1 GiB; microbatches = 4 frees 1 MiB")
    assert "zero = 2" not in str(error.value)


def test_whether_it_fits_simulated_devices_is_no_question():
    with pytest.raises(JaxparError) as error:
        jp.assert_fits(STEP)
    refused(error, "whether step fits on 8 x made by hand", "no capacity of their own", "jp.target_devices('h100:1x8')")
