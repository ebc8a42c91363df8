"""The schedule of a pipeline that names none: what is fastest on its devices, and why, in words."""

import json
from functools import partial

import hooks
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import Staged

import jaxpar as jp
from jaxpar.job.check import job_devices
from jaxpar.job.file.parse import loads
from jaxpar.mesh.devices import Simulated
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel import compose as composing

EIGHT = {"pipe": 2, "data": 2, "fsdp": 2}


def composed(devices, sizes=EIGHT, **pipeline):
    parallel = jp.Parallel(**sizes, pipeline=jp.Pipeline(**{"microbatches": 4, **pipeline}))
    return jp.compose(partial(Staged, tied=False), parallel, devices)


def said(layout):
    (note,) = [note for note in layout.notes if note.startswith("schedule: ")]
    assert note in layout.explain()
    return note


def test_simulated_devices_run_1f1b_by_default_for_they_would_compute_idle_cells_too():
    layout = composed(jax.devices())
    assert layout.schedule.name == "1f1b"
    assert f"1f1b_phased computes {(4 + 2 - 1) / 4:.2f} x its work" in said(layout)  # (M + P - 1) / M


@pytest.mark.parametrize("devices", [8, 16], ids=["as many", "more"])
def test_gpus_run_a_phased_table_by_default(devices):
    layout = composed(devices, EIGHT | {"data": devices // 4})
    assert layout.schedule.name == "1f1b_phased"
    assert "host round trip" in said(layout)


PHASED = {
    "tensor": (EIGHT | {"data": 1, "tensor": 2}, {}, "collectives over tensor"),
    "context": (EIGHT | {"data": 1, "context": 2}, {}, "collectives over context"),
    "a spread head": (EIGHT, {"head": "spread"}, "a head that is spread"),
    "weights that change within a step": (EIGHT, {"weights": "stash"}, "losses of a run depend on its table"),
}


@pytest.mark.parametrize("case", PHASED)
def test_where_stages_must_go_the_same_way_the_default_is_phased_on_simulated_devices_too(case):
    sizes, settings, why = PHASED[case]
    layout = composed(jax.devices(), sizes, **settings)
    assert layout.schedule.name == "1f1b_phased"
    assert why in said(layout)


@pytest.mark.parametrize("name", ["1f1b_phased", "1f1b", "gpipe"])
@pytest.mark.parametrize("devices", [8, Simulated(8)], ids=["absent", "simulated"])
def test_a_schedule_that_is_named_stays_on_all_devices(name, devices):
    layout = composed(devices, schedule=name)
    assert layout.schedule.name == layout.parallel.pipeline.schedule == name
    assert not any(note.startswith("schedule") for note in layout.notes)


@pytest.mark.parametrize("sizes", [EIGHT, PHASED["tensor"][0]], ids=["1f1b", "phased"])
def test_simulated_devices_that_are_not_there_are_told_what_would_run(sizes):
    there, not_there = composed(jax.devices(), sizes), composed(Simulated(8), sizes)
    assert (there.schedule, there.notes) == (not_there.schedule, not_there.notes)


@pytest.mark.parametrize(
    ("mesh", "wanted"), [({"simulate": 8}, Simulated(8)), ({"devices": 8}, 8), ({"target": "h100:1x8"}, 8)]
)
def test_a_job_that_is_checked_is_told_what_its_own_devices_would_run(mesh, wanted):
    ((key, value),) = mesh.items()
    assert job_devices(loads("", [f"mesh.{key}={value}"])) == wanted


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_the_program_for_gpus_is_that_of_the_phased_table():
    def program(**pipeline):
        layout = composed(jp.target_devices("h100:1x8"), **pipeline)
        step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3))
        tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
        return step.lower(step.abstract(), {"inputs": tokens, "targets": tokens}).as_text()

    assert program() == program(schedule="1f1b_phased")


PIPE = ("parallel.data=1", "parallel.pipe=2", "model.layers=2", "parallel.pipeline.microbatches=4")


def losses(folder):
    return [row["loss"] for row in hooks.rows(folder) if "loss" in row]


@pytest.mark.nightly
def test_a_run_that_goes_on_on_other_devices_says_that_its_schedule_is_another(tmp_path, monkeypatch):
    """GPUs are played by devices that are not taken for simulated ones."""

    def trained(name, steps):
        _, said = hooks.run(tmp_path / name, *PIPE, f"train.steps={steps}")
        return said, json.loads((tmp_path / name / "run.json").read_text())["schedule"]

    assert trained("moved", 2)[1] == "1f1b"
    with monkeypatch.context() as patch:
        patch.setattr(composing, "is_simulated", lambda devices: False)
        said, schedule = trained("moved", 4)
    assert schedule == "1f1b_phased"
    assert "changed since step 2: parallel.pipeline.schedule = 1f1b_phased, it was 1f1b" in said
    said, schedule = trained("moved", 6)
    assert schedule == "1f1b"
    assert "changed since step 4: parallel.pipeline.schedule = 1f1b, it was 1f1b_phased" in said
    trained("stayed", 6)
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "stayed"), rtol=1e-6)
