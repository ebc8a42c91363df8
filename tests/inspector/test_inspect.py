"""The inspector on whole programs: memory to the byte, planted faults found and named, the verb, garbage refused."""

import json
import resource
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import some

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import load
from jaxpar.mesh.chips import find_chip
from jaxpar.mesh.target import Target, missing_plugin
from jaxpar.pipeline.run import execute, stage, stage_gradients

gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
SETTINGS = jp.DecoderConfig(vocab=256, seq=64, layers=2, dim=64, heads=4)
BATCH = {name: jax.ShapeDtypeStruct((16, 64), jnp.int32) for name in ("inputs", "targets")}


def step_on(target, parallel, model=None, loss=jp.next_token_loss, **numerics):
    devices = jp.target_devices(target) if target else None
    model = model or partial(jp.Decoder, SETTINGS)
    return jp.train_step(jp.compose(model, parallel, devices), loss, optax.adamw(1e-3), **numerics)


def mesh_of(**axes):
    devices = np.array(jp.target_devices("h100:1x8")).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def shaped(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def kinds(report):
    return [flag.kind for flag in report.flags]


@pytest.mark.nightly
@gpu_compiler
@pytest.mark.parametrize(
    "parallel",
    [jp.Parallel(data=2, fsdp=2, tensor=2), pytest.param(jp.Parallel(fsdp=8, zero=1), marks=pytest.mark.full)],
    ids=str,
)
def test_causes_add_up_and_arguments_are_exact_to_the_byte(parallel):
    step = step_on("h100:1x8", parallel, precision="bf16", remat="full")
    report = jp.inspect(step, BATCH)
    assert sum(share.bytes for share in report.memory) == report.total
    shares = {share.cause: share for share in report.memory}
    state = step.abstract()

    def held(tree):
        return sum(
            int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
        )

    assert shares["parameters"].bytes == held(state.params)
    assert shares["optimizer state"].bytes == held(state.optimizer)
    assert shares["batch"].bytes == 2 * 16 * 64 * 4 // step.layout.replicas
    assert all(share.how == "exact" for share in report.memory if share.cause in ("parameters", "batch"))
    assert {"gradients", "activations"} <= shares.keys()
    names = [name for name, _ in shares["everything else"].largest]
    assert "arguments beyond their shapes" not in names
    assert "arguments that nothing reads" not in names
    assert report.fits
    jp.assert_fits(report)


@pytest.mark.nightly
@gpu_compiler
def test_the_models_flop_are_the_hardwares_without_recomputation():
    plain = jp.inspect(step_on("h100:1x8", jp.Parallel(data=8)), BATCH)
    assert plain.flop.recomputed == 0
    assert plain.flop.total * 8 == pytest.approx(plain.model_flop, rel=1e-6)
    full = jp.inspect(step_on("h100:1x8", jp.Parallel(data=8), remat="full"), BATCH)
    assert full.flop.recomputed > 0.1 * full.flop.total
    assert full.model_flop == plain.model_flop
    assert full.flop.total - full.flop.recomputed == pytest.approx(plain.flop.total, rel=0.02)


@pytest.mark.nightly
@gpu_compiler
def test_a_time_and_an_mfu_are_modelled_for_a_gpu_and_never_for_simulated_devices():
    gpu = jp.inspect(step_on("h100:1x8", jp.Parallel(data=8)), BATCH)
    assert gpu.timeline.seconds == pytest.approx(gpu.timeline.compute + sum(gpu.timeline.exposed.values()), rel=1e-6)
    assert 0 < gpu.mfu < 1
    assert "MFU" in str(gpu)
    assert str(gpu).count("(modelled)") == 2
    cpu = jp.inspect(step_on(None, jp.Parallel(data=8)), BATCH)
    assert cpu.timeline is None
    assert cpu.mfu is None
    assert cpu.fits is None
    assert not any(word in str(cpu) for word in ("MFU", "Time", "modelled"))
    assert "no reduce-scatter" in str(cpu)
    assert sum(share.bytes for share in cpu.memory) == cpu.total
    with pytest.raises(JaxparError, match="simulated devices have no capacity"):
        jp.assert_fits(cpu)


@pytest.mark.nightly
@gpu_compiler
def test_a_constraint_that_replicates_is_found_at_its_line():
    class Replicating(jp.Decoder):
        def __call__(self, tokens):
            logits = super().__call__(tokens)
            return jax.lax.with_sharding_constraint(logits, P())  # the planted fault

    report = jp.inspect(step_on("h100:1x8", jp.Parallel(data=8), partial(Replicating, SETTINGS)), BATCH)
    (flag,) = [flag for flag in report.flags if flag.kind == "replicates"]
    assert "all-gather over data" in flag.text
    assert any(file in flag.text for file in ("test_inspect.py", "decoder.py", "custom_gradients.py"))
    clean = jp.inspect(step_on("h100:1x8", jp.Parallel(data=8)), BATCH)
    assert kinds(clean) == []


@pytest.mark.nightly
@gpu_compiler
def test_a_psum_per_microbatch_is_found_and_one_for_all_is_not():
    mesh = mesh_of(data=8)

    def loss(ws, x):
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)
        return jnp.sum(x**2)

    def often(ws, xs):
        def body(total, x):
            return total + jax.grad(loss)(ws, x), None  # each device holds all of it, so it is summed here

        total, _ = jax.lax.scan(body, jnp.zeros_like(ws), xs)
        return ws - total

    def once(ws, xs):
        return ws - jax.grad(loss)(ws, xs.reshape(-1, xs.shape[-1]))

    given = (shaped(mesh, (), 3, 256, 256), shaped(mesh, (None, "data"), 4, 64, 256))
    four = jp.inspect(jax.jit(often), *given, roles=("parameters", "batch"))
    (flag,) = four.flags
    assert flag.kind == "per microbatch"
    assert "args[0]" in flag.text
    assert "12 times a step" in flag.text
    assert "reduced 4 times" in flag.text
    jp.assert_collectives(four, {"data": {"all-reduce": 12}})
    assert "per microbatch" not in kinds(jp.inspect(jax.jit(once), *given, roles=("parameters", "batch")))


@gpu_compiler
def test_a_dropped_gradient_sharding_is_found():
    mesh = mesh_of(fsdp=8)

    def step(w, x, *, keep):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        gradient = jax.lax.with_sharding_constraint(gradient, P("fsdp") if keep else P())
        norm = jnp.sqrt(jnp.sum(gradient**2))  # a use of the whole gradient, so that XLA cannot scatter it
        return w - gradient / norm, gradient if not keep else norm

    with jax.set_mesh(mesh):
        given = (shaped(mesh, ("fsdp",), 1024, 512), shaped(mesh, ("fsdp",), 64, 1024))
        dropped = jp.inspect(jax.jit(partial(step, keep=False)), *given, roles=("parameters", "batch"))
        kept = jp.inspect(jax.jit(partial(step, keep=True)), *given, roles=("parameters", "batch"))
    (flag,) = [flag for flag in dropped.flags if flag.kind == "unsharded gradient"]
    assert "args[0]" in flag.text
    assert "test_inspect.py" in next(e.source for e in dropped.ledger if e.kind == "all-reduce" and e.payload > 10**6)
    assert "unsharded gradient" not in kinds(kept)


@gpu_compiler
def test_a_cast_that_doubles_the_wire_is_found():
    mesh = mesh_of(tensor=8)
    low = jnp.bfloat16

    def step(x, up, down, *, cast):
        h = jnp.tanh(x @ up)
        y = jnp.einsum("bf,fd->bd", h, down, preferred_element_type=jnp.float32 if cast else low)
        return jax.lax.with_sharding_constraint(y, P()).astype(low)  # the sum over tensor travels as it is made

    with jax.set_mesh(mesh):
        given = (
            shaped(mesh, (), 4096, 256, dtype=low),
            shaped(mesh, (None, "tensor"), 256, 1024, dtype=low),
            shaped(mesh, ("tensor",), 1024, 256, dtype=low),
        )
        wide = jp.inspect(jax.jit(partial(step, cast=True)), *given, roles=("batch", "parameters", "parameters"))
        narrow = jp.inspect(jax.jit(partial(step, cast=False)), *given, roles=("batch", "parameters", "parameters"))
    (flag,) = wide.flags
    assert flag.kind == "wide wire"
    assert "all-reduce over tensor of f32, 4 MiB" in flag.text
    assert "test_inspect.py" in flag.text
    assert narrow.flags == ()
    assert sum(e.step_wire for e in wide.ledger) == 2 * sum(e.step_wire for e in narrow.ledger)


PIPES = jp.Parallel(pipe=2, fsdp=4, pipeline=jp.Pipeline(microbatches=4))


@pytest.mark.nightly
@gpu_compiler
def test_a_pipeline_is_told_without_a_false_flag():
    step = step_on("h100:1x8", PIPES, precision="bf16")
    report = jp.inspect(step, BATCH)
    assert kinds(report) == []
    assert report.schedule == step.layout.schedule
    found = json.loads(json.dumps(report.to_dict()))["pipeline"]
    assert (found["stages"], found["microbatches"], found["messages"]) == (2, 4, 8)
    assert found["permutes"] == found["ticks"] == 10  # stages that mix nothing send one way in a tick
    assert found["largest"] == 64 * 64 * 2  # a row of 64 tokens, 64 wide, in 16 bits
    assert "Pipeline: 1f1b_phased, 2 stages, 4 microbatches: 10 ticks, 20.0% of the cells idle (exact)" in str(report)
    assert 0 < report.flop.recomputed < report.flop.backward
    memory = {share.cause: share for share in report.memory}
    whole = sum(place.leaf.size * 4 // (2 if path.startswith("blocks") else 1)
                for path, place in step.layout.placements.items())  # fmt: skip
    assert 0.7 * whole < memory["gradients"].bytes < 2 * whole  # float32 sums, whole over fsdp
    assert memory["everything else"].bytes < 0.1 * report.total
    assert all(entry.backward for entry in report.ledger if entry.kind == "reduce-scatter")


@gpu_compiler
@pytest.mark.nightly
def test_reductions_per_tick_and_wide_messages_are_found_in_a_pipeline(monkeypatch):
    def add(total, more):  # the planted faults: a reduction for every microbatch, and messages in 32 bits
        return total + jax.lax.psum(more.astype(total.dtype), "fsdp") / 4

    def send(x, *, pairs, send=execute._permute):
        # something added on the way: XLA sends in 16 bits what was only cast
        return (send(x.astype(jnp.float32) + 1e-3, pairs=pairs) - 1e-3).astype(x.dtype)

    for module in (stage_gradients, stage):
        monkeypatch.setattr(module, "add", add)
    monkeypatch.setattr(execute, "_permute", send)
    report = jp.inspect(step_on("h100:1x8", PIPES, precision="bf16"), BATCH)
    assert {"per microbatch", "wide wire"} <= {*kinds(report)}
    assert any("collective-permute over pipe of f32" in flag.text for flag in report.flags)


@gpu_compiler
@pytest.mark.nightly
def test_a_table_that_mixes_ops_and_updates_in_its_middle_is_counted_by_its_cells():
    how = jp.Pipeline(schedule="1f1b", microbatches=4, keep="residuals", weights="stash")
    report = jp.inspect(step_on("h100:1x8", jp.Parallel(pipe=2, data=4, pipeline=how), precision="bf16"), BATCH)
    assert kinds(report) == []
    assert any("in every one of them" in note for note in report.notes)
    assert report.flop.recomputed == 0
    assert report.flop.backward == pytest.approx(2 * report.flop.forward, rel=0.01)
    head = 6 * 16 * 64 * 64 * 256  # of a step; counted on both stages, though one of them has it
    assert report.flop.total * 8 == pytest.approx(report.model_flop + head, rel=0.01)
    weights = next(share for share in report.memory if share.cause == "gathered weights")
    assert weights.largest[0][0] == "versions of the weights"


@gpu_compiler
def test_an_axis_that_never_communicates_is_found():
    mesh = mesh_of(data=2, idle=4)
    step = jax.jit(lambda w, x: jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w))
    report = jp.inspect(step, shaped(mesh, (), 64, 64), shaped(mesh, ("data",), 64, 64), roles=("parameters", "batch"))
    assert kinds(report) == ["idle axis"]
    assert "idle=4" in report.flags[0].text


@pytest.mark.nightly
@gpu_compiler
def test_what_xla_computes_again_to_save_memory_is_found():
    """Told of a smaller GPU, XLA repeats products of its own accord: as many FLOP more as the report says."""

    def gradient(weight, x):
        def loss(weight):
            y = x
            for _ in range(12):
                y = jnp.tanh(y @ weight)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.grad(loss)(weight)

    def report_on(chip):
        devices = np.array(jp.target_devices(Target(chip, 1, 8)))
        mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
        weight, x = (
            shaped(mesh, (), 256, 256, dtype=jnp.bfloat16),
            shaped(mesh, ("data",), 2**19, 256, dtype=jnp.bfloat16),
        )
        return jp.inspect(jax.jit(gradient), weight, x, roles=("parameters", "batch"))

    chip = find_chip("h100")
    roomy, short = report_on(chip), report_on(replace(chip, reported_memory=400 * 2**20))
    assert roomy.flop.squeezed == 0
    assert "squeezed" not in kinds(roomy)
    assert short.flop.squeezed == short.flop.total - roomy.flop.total > 0.1 * roomy.flop.total
    assert short.flop.recomputed == short.flop.squeezed
    assert "again of its own accord" in next(flag.text for flag in short.flags if flag.kind == "squeezed")


@gpu_compiler
def test_a_loop_with_an_unknown_end_is_said_to_be_unknown():
    mesh = mesh_of(data=8)

    def until(x):
        def more(x):
            return jax.lax.psum(x, "data") / 8.1

        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, more, x)

    step = jax.jit(jax.shard_map(until, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    report = jp.inspect(step, shaped(mesh, (), 4096))
    assert all(entry.times is None for entry in report.ledger)
    assert "unknown" in kinds(report)
    with pytest.raises(JaxparError, match="an unknown number of times"):
        jp.assert_collectives(report, {"data": {"all-reduce": 1}})


@pytest.mark.nightly
@gpu_compiler
def test_the_verb_reports_writes_and_compares(tmp_path, capsys):
    job, other = "configs/zero3_fsdp8.toml", tmp_path / "other.toml"
    out, page = tmp_path / "report.json", tmp_path / "report.html"
    small = ["model.layers=2", "model.dim=64"]
    other.write_text(dumps(load("configs/zero2_fsdp8.toml", small)))
    words = ["--target", "h100", "--json", str(out), "--html", str(page), "--compare", str(other)]
    status = main(["inspect", job, *small, *words])
    said = capsys.readouterr().out
    assert status == 0
    assert "reduce-scatter" in said
    assert "other - one" in said
    made = json.loads(out.read_text())
    assert made["job"]["fits"] is True
    assert sum(share["bytes"] for share in made["job"]["memory"]) == made["job"]["total"]
    assert page.read_text().lower().startswith("<!doctype html>")


@gpu_compiler
@pytest.mark.nightly
def test_what_does_not_fit_ends_with_status_1_and_says_what_would_help(capsys):
    large = ["model.dim=8192", "model.layers=16", "model.hidden=32768"]
    status = main(["inspect", "configs/data8.toml", "--target", "h100", *large])
    said = capsys.readouterr().out
    assert status == 1
    assert "DOES NOT FIT" in said
    assert "train.remat = 'full'  frees" in said


@pytest.mark.spread(0)
@gpu_compiler
@pytest.mark.parametrize(
    "name", some([path.stem for path in sorted(Path("configs").glob("*.toml"))], [], ["context4_data2"])
)
def test_every_job_of_configs_passes_inspection_for_its_own_target(name, tmp_path, capsys):
    simulated = not name.startswith("gpu_")
    target = ["--target", "h100"] if simulated else []  # those on simulated devices are shown as they would be on GPUs
    out = tmp_path / "report.json"
    begin = time.perf_counter()
    status = main(["inspect", f"configs/{name}.toml", *target, "--json", str(out)])
    seconds = time.perf_counter() - begin
    assert status == 0, capsys.readouterr()
    report = json.loads(out.read_text())
    assert report["fits"] is True
    assert sum(share["bytes"] for share in report["memory"]) == report["total"]
    assert {flag["kind"] for flag in report["flags"]} <= {"per microbatch", "unsharded gradient"}
    if "70b" in name:
        assert seconds < 60
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20  # KiB on Linux


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--target", "h900:1x8"], "h900"),
        (["--target", "h100:1x7"], "need 8 devices, 7"),
        (["--target", "h100:0x8"], "CHIP:NODESxGPUS"),
        (["--target", "tpu"], "chips are"),
        (["--html", "/no/such/folder/x.html"], "folder that exists"),
        (["--compare", "no_such_job.toml"], "no_such_job.toml"),
        (["model.heads=7"], "heads"),
    ],
)
def test_a_wrong_request_is_one_clear_error(given, words, capsys):
    assert main(["inspect", "configs/zero3_fsdp8.toml", *given]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert said.count("rule:") >= 1


def test_without_the_plugin_the_way_out_is_said(monkeypatch, capsys):
    monkeypatch.setattr("jaxpar.mesh.target.PLUGIN", "jax_plugins.not_there")
    assert main(["inspect", "configs/zero3_fsdp8.toml", "--target", "h200:1x8"]) == 1
    said = capsys.readouterr().err
    assert "jax-cuda13-pjrt is not installed" in said
    assert "--target cpu" in said


def test_misuse_is_one_clear_error():
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    x = shaped(mesh, ("data",), 16, 16)
    step = jax.jit(lambda w, x: jnp.sum(w @ x))
    report = jp.inspect(step, x, x)
    for wrong, words in [
        (lambda: jp.inspect(lambda x: x, x), "jp.inspect takes a jitted function"),
        (lambda: jp.inspect(step, x), "missing 1 required"),
        (lambda: jp.inspect(step, x, x, roles=("weights",)), "a role is one of"),
        (lambda: jp.inspect(step, x, x, roles="batch"), "roles are a tuple"),
        (lambda: jp.inspect(step, x, x, mesh=3), "a mesh is"),
        (lambda: jp.assert_collectives(report, {"tensor": {"all-reduce": 1}}), "an axis of the mesh: data"),
        (lambda: jp.assert_collectives(report, {"data": 12}), "a budget maps each axis"),
        (lambda: jp.assert_collectives(3, {}), "a report is what jp.inspect returns"),
        (lambda: jp.target_devices("h100"), "CHIP:NODESxGPUS"),
    ]:
        with pytest.raises(JaxparError, match=words):
            wrong()
