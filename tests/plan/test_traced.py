"""A plan for any model: what tracing shows of it, what follows, and the compiler beside it."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bench.command import main as bench
from flax import nnx

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import loads
from jaxpar.job.plan import apply_layout
from jaxpar.job.plan import question as asked_of
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR
from jaxpar.plan.model.buffer_reuse import results_over_operands
from jaxpar.plan.model.fusion import fuse
from jaxpar.plan.model.kernel_order import SCATTERED, run_places
from jaxpar.plan.model.program import value
from jaxpar.plan.model.program_reader import read_program
from jaxpar.plan.model.tracing import Matmul, trace
from jaxpar.plan.search import search

VIT = """
[model]
name = "vit"
layers = 4
dim = 64
heads = 4
[data]
source = "digits"
[train]
loss = "classify"
global_batch = 64
precision = "bf16"
"""
CONV = VIT.replace('"vit"', '"resnet"').split("layers")[0] + VIT[VIT.index("[data]") :]


@cache
def question(text, *overrides, devices=8, **given):
    return asked_of(
        loads(text, overrides, allow_import=True), devices=devices, chip="h100", per_node=None, options=given
    )


def shapes(**sizes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


def traced(function, params, row, **given):
    known = lambda rows: jax.ShapeDtypeStruct((rows, *row), jnp.float32)  # noqa: E731
    return trace(lambda remat: partial(function, remat), params, known, **({"takes_remat": False, "name": "f"} | given))


def test_a_product_has_2_flop_per_multiplication_and_kind_and_count():
    def function(remat, p, x):
        def body(x, _):
            return jnp.tanh(x @ p["square"]), None

        x = jax.lax.scan(body, x, None, length=5)[0] @ p["wide"]
        scores = jnp.einsum("rij,rkj->rik", x.reshape(-1, 4, 5), x.reshape(-1, 4, 5))
        image = jax.lax.conv(x.reshape(-1, 1, 4, 5), p["kernel"], (1, 1), "SAME")
        return jnp.sum(scores) + jnp.sum(image)

    found = traced(function, shapes(square=(6, 6), wide=(6, 20), kernel=(7, 1, 3, 3)), (6,)).matmuls
    assert found == (
        Matmul(flop=2 * 6 * 6, times=5, kind="weights"),
        Matmul(flop=2 * 6 * 20, times=1, kind="weights"),
        Matmul(flop=2 * 4 * 4 * 5, times=1, kind="batched"),
        Matmul(flop=2 * 7 * 4 * 5 * 3 * 3, times=1, kind="convolution"),
    )


def test_live_arrays_grow_with_the_rows_as_the_policy_leaves_them():
    def function(remat, p, x):
        def layer(x):
            return jnp.sin(x @ p["square"])  # the backward pass reads the matmul's result: sin is computed again

        again = jax.checkpoint(layer, policy={"dots": jax.checkpoint_policies.dots_saveable}.get(remat))
        for _ in range(3):
            x = again(x) if remat != "none" else layer(x)
        return jnp.sum(x)

    found = traced(function, shapes(square=(16, 16)), (16,), takes_remat=True)
    row = 4 * 16
    peaks = {name: program.peak(1000, weights=0, gradients=0) for name, program in found.programs.items()}
    live = {name: peak["activations"] / (1000 * row) for name, peak in peaks.items()}
    assert 4 <= live["none"] <= 6  # the batch, a result of each layer, and a gradient
    assert live["full"] <= live["none"]
    assert found.blocks == 3
    kernels = {name: int(program.runs.sum()) for name, program in found.programs.items()}
    assert kernels["full"] > kernels["none"]  # it computes two layers again
    assert [matmul.flop for matmul in found.backward] == 5 * [2 * 16 * 16]  # the batch has no gradient


def test_what_is_frozen_has_no_gradient_matmul_of_its_own():
    def function(remat, p, x):
        return jnp.sum(jnp.tanh(x @ p["one"]) @ p["two"])

    names = shapes(one=(16, 32), two=(32, 8))
    whole, head, body = (
        len(traced(function, names, (16,), frozen=frozen).backward) for frozen in ((), ["one"], ["two"])
    )
    assert (whole, head, body) == (3, 1, 2)


def test_a_scan_keeps_what_it_stacks_and_no_scan_keeps_less():
    def unrolled(remat, p, x):
        for number in range(8):
            x = jax.nn.silu(x @ p["stack"][number])
        return jnp.sum(x)

    def scanned(remat, p, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jax.nn.silu(x @ w), None), x, p["stack"])[0])

    params, peaks = shapes(stack=(8, 64, 64)), {}
    for function in (unrolled, scanned):
        found = traced(function, params, (64,))
        peaks[function] = found.programs["none"].peak(4096, weights=0, gradients=0)["activations"]
        assert sum(matmul.times for matmul in (*found.matmuls, *found.backward)) in (23, 24)
    row = 4096 * 64 * 4
    residuals = jax.eval_shape(
        lambda p, x: jax.vjp(lambda p: scanned("none", p, x), p)[1],
        params,
        jax.ShapeDtypeStruct((4096, 64), jnp.float32),
    )
    stacked = sum(leaf.size * 4 for leaf in jax.tree.leaves(residuals) if leaf.shape[:2] == (8, 4096))
    assert stacked <= peaks[scanned] <= stacked + 6 * row
    assert peaks[unrolled] < peaks[scanned]


def test_a_scan_does_not_read_arrays_of_one_constant_value():
    def masked(fill, x, w):
        return jax.nn.silu(jnp.where(x > 0, x, fill) @ w), None

    def inside(remat, p, x):
        return jnp.sum(jax.lax.scan(lambda x, w: masked(-1e30, x, w), x, p["stack"])[0])

    def outside(remat, p, x):
        fill = jnp.full(x.shape, -1e30)  # as JAX moves constants out of a scan
        return jnp.sum(jax.lax.scan(lambda x, w: masked(fill, x, w), x, p["stack"])[0])

    peaks, traffic = [], []
    for function in (inside, outside):
        program = traced(function, shapes(stack=(8, 64, 64)), (64,)).programs["none"]
        peaks.append(program.peak(4096, weights=0, gradients=0)["activations"])
        traffic.append(float((program.runs * value(program.traffic, 4096)).sum()))
    assert peaks[1] == pytest.approx(peaks[0], rel=1e-3)
    assert traffic[1] == pytest.approx(traffic[0], rel=1e-3)


def peak_of_poolings(blocks, size, *, again):
    """Bytes per row at the fullest moment of convolutions with a relu and a max-pooling each."""

    def function(remat, p, x):
        def block(x, kernel):
            image = jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME"))
            return jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 1, size, size), (1, 1, 2, 2), "SAME")

        for kernel in p.values():
            x = (jax.checkpoint(block) if again else block)(x, kernel)
        return jnp.sum(jnp.sin(x))

    kernels = {f"kernel {number}": (16, 16 if number else 1, 3, 3) for number in range(blocks)}
    program = traced(function, shapes(**kernels), (1, 8, 8)).programs["none"]
    return program.peak(1000, weights=0, gradients=0)["activations"] / 1000


@pytest.mark.parametrize(
    ("size", "again", "keeps"), [(3, False, True), (2, False, False), (3, True, False), (2, True, False)]
)
def test_a_max_pooling_has_positions_for_its_gradient(size, again, keeps):
    """They are kept from the forward pass only if windows overlap, and if nothing is computed again."""
    image, pooled = 4 * 16 * 8 * 8, 4 * 16 * 4 * 4
    one, two = (peak_of_poolings(blocks, size, again=again) for blocks in (1, 2))
    # the batch; relu's operand, result and zeros; pooled values, a maximum and four numbers of its position
    assert one == pytest.approx(4 * 8 * 8 + 3 * image + (1 + 1 + 4) * pooled)
    assert (two > one + 1) == keeps


@pytest.mark.parametrize(("width", "waits"), [(64, True), (2048, False)])
def test_what_small_gradients_read_is_kept_until_their_collective(width, waits):
    def function(remat, p, x):
        for name in ("one", "two", "three", "four"):
            x = jnp.sin(x @ p[name])
        return jnp.sum(x)

    names = shapes(**dict.fromkeys(("one", "two", "three", "four"), (width, width)))
    program = traced(function, names, (width,)).programs["none"]
    alone, combined = (
        program.peak(4096, weights=0, gradients=0, combined=size)["activations"] for size in (0, SCATTERED)
    )
    assert (combined > alone + 4096 * 4 * width) == waits  # a weight of 16 MiB has a collective of its own


@pytest.mark.slow
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.parametrize("name", ["recommender", "U-Net", "LSTM"])
def test_a_plan_is_near_the_compiled_program(name):
    from bench.plain_models import CASES
    from bench.traced_models import compare

    error = compare(CASES[name]())["error"]
    newest = jax.__version_info__ >= (0, 12)  # the rules are of its XLA; 0.10's writes an LSTM 7 % larger
    assert abs(error["bytes"]) < (0.06 if newest else 0.1)
    assert abs(error["seconds"]) < 0.12


def test_what_keeps_nothing_of_a_row_cannot_be_planned():
    with pytest.raises(JaxparError, match="keeps nothing of a row"):
        traced(lambda remat, p, x: jnp.sum(p["w"]), shapes(w=(3,)), (2,))


@pytest.mark.nightly
def test_flop_of_a_vision_transformer_are_those_of_its_matrices():
    model = question(VIT).model
    patches, dim = 16, 64  # 8 x 8 pixels in patches of 2 x 2, and no token for the class
    matrices = 4 * (4 * dim * dim + 8 * dim * dim) + 4 * dim
    weights = sum(each.flop * each.times for each in model.shape.trace.matmuls if each.kind != "batched")
    assert weights == pytest.approx(2 * (patches * matrices + 10 * dim), rel=1e-9)
    batched = sum(each.flop * each.times for each in model.shape.trace.matmuls if each.kind == "batched")
    assert batched == 4 * 2 * 2 * patches * patches * dim
    assert model.shape.trace.blocks == 4


@pytest.mark.spread(0)
@pytest.mark.parametrize("text", [VIT, pytest.param(CONV, marks=pytest.mark.slow)], ids=["vit", "resnet"])
def test_static_bytes_are_those_of_the_layout(text):
    """To the byte, what no axis divides included."""
    import jaxpar as jp
    from jaxpar.job.parts.models import resolve_loss, resolve_model
    from jaxpar.sharding.names import shard_bytes

    job, asked = loads(text), question(text)
    for fsdp in (2, 8):
        layout = jp.compose(resolve_model(job, resolve_loss(job)), jp.Parallel(fsdp=fsdp, zero=3), fsdp)
        exact = sum(shard_bytes(place.leaf, place.stored, layout.sizes) for place in layout.placements.values())
        found = asked.bytes(Candidate(fsdp=fsdp, data=8 // fsdp, zero=3, microbatch=8))
        assert found.parameters == exact
        assert found.optimizer == pytest.approx(2 * exact, rel=1e-3)  # adamw; and a counter


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("text", [VIT, pytest.param(CONV, marks=pytest.mark.slow)], ids=["vit", "resnet"])
def test_a_step_made_in_python_is_planned_as_the_job_of_the_same_model(text):
    """Whatever its own layout is; with statistics and a frozen part too."""
    import jaxpar as jp
    from jaxpar.job.parts.batches import abstract_batch
    from jaxpar.job.parts.models import resolve_loss, resolve_model
    from jaxpar.job.parts.optimizers import resolve_optimizer

    job = loads(text, ["train.freeze=['head*']", *["model.layers=1"] * (text is VIT)])
    layout = jp.compose(resolve_model(job, resolve_loss(job)), jp.Parallel(data=4, fsdp=2))
    step = jp.train_step(layout, resolve_loss(job), resolve_optimizer(job), precision="bf16")
    ours, its = jp.plan(step, abstract_batch(job), devices=16), jp.plan(job, devices=16)
    assert [each.to_dict() for each in ours.best] == [each.to_dict() for each in its.best]
    assert (ours.considered, ours.fitting) == (its.considered, its.fitting)
    assert ours.command.startswith("layout = jp.compose(model, jp.Parallel(")
    assert "optimizer, precision='bf16'" in ours.command  # as it is planned
    assert "layout = jp.compose" in ours._repr_html_()


@pytest.mark.nightly
def test_a_step_whose_chain_has_a_mask_for_each_parameter_is_planned():
    from test_python_api import BATCH, Net, loss

    import jaxpar as jp

    mask = {part: {"kernel": True, "bias": False} for part in ("up", "down")}
    chain = optax.chain(optax.masked(optax.add_decayed_weights(0.1), mask), optax.adam(1e-3))
    plans = [
        jp.plan(jp.train_step(jp.compose(Net, jp.Parallel(fsdp=8)), loss, each), BATCH, devices=8)
        for each in (chain, optax.adam(1e-3))
    ]
    masked, plain = ([each.to_dict() for each in plan.best] for plan in plans)
    assert masked == plain


@pytest.mark.nightly
def test_layouts_that_fit_with_none_to_spare_are_ranked_where_no_other_fits():
    from test_python_api import BATCH, Net, loss

    import jaxpar as jp

    step = jp.train_step(jp.compose(Net, jp.Parallel(fsdp=8)), loss, optax.adam(1e-3))
    least = min(jp.plan(step, BATCH, devices=8).points.bytes)
    plan = jp.plan(step, BATCH, devices=8, memory=f"{int(1.02 * least)}B")
    assert "no memory to spare" in str(plan)
    assert least <= plan.best[0].memory.total <= 1.02 * least


@pytest.mark.nightly
def test_a_model_that_names_shardings_itself_is_planned_as_the_one_that_names_none():
    from explicit_model import Explicit, Plain
    from published.example import language_loss, tokens

    import jaxpar as jp

    plans, rows = [], tokens(np.random.default_rng(0))
    for model in (Explicit, Plain):
        layout = jp.compose(model, jp.Parallel(fsdp=4, tensor=2, rules={"tp": "tensor"} if model is Explicit else {}))
        plans.append(jp.plan(jp.train_step(layout, language_loss, optax.adam(1e-3)), rows, devices=8))
    named, plain = ([each.to_dict() for each in plan.best] for plan in plans)
    assert named == plain


@pytest.mark.nightly
def test_the_state_is_that_of_the_jobs_optimizer():
    held = {name: float(question(VIT, f"optimizer.name={name}").bytes(Candidate(data=8)).optimizer)
            for name in ("adamw", "sgd", "lion")}  # fmt: skip
    whole = 4 * question(VIT).model.parameters
    assert held["adamw"] == pytest.approx(2 * whole, rel=1e-3)
    assert held["sgd"] == held["lion"] == pytest.approx(whole, rel=1e-3)


@pytest.mark.full
def test_float32_takes_longer_and_sends_twice_as_much():
    one = Candidate(fsdp=8, zero=3, microbatch=8)
    half, full = (question(VIT, "model.dim=1024", f"train.precision={name}").seconds(one) for name in ("bf16", "fp32"))
    assert 1.8 * half.matmuls < full.matmuls < 2 * half.matmuls  # two gradients of scores are in float32 in both
    assert full.sharding > half.sharding


@pytest.mark.nightly
def test_every_layout_of_data_fsdp_and_tensor_is_weighed():
    plan = search(question(VIT), top=500)
    # remats, and microbatches of replicas of 8, 16, 32 and 64 rows, with stages of ZeRO on each size of fsdp above 1
    every = plan.question.legal()
    context, unpipelined = np.asarray(every.context), np.asarray(every.pipe) == 1
    assert (unpipelined & (context == 1)).sum() == 4 * (4 * (1 + 3 * 3) + 5 * (1 + 3 * 2) + 6 * (1 + 3) + 7)
    # context leaves replicas as tensor does, alone (2, 4, 8) and with it (2 x 2; 2 x 4 and 4 x 2); it names the patches
    assert (unpipelined & (context > 1)).sum() == 4 * (5 * (1 + 3 * 2) + 2 * 6 * (1 + 3) + 3 * 7)
    pairs = {*zip(context[context > 1].tolist(), np.asarray(every.tensor)[context > 1].tolist(), strict=True)}
    assert pairs == {(2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2)}
    assert plan.considered == len(unpipelined)
    assert {*np.asarray(every.pipe).tolist()} == {1, 2, 4}  # of 4 layers
    assert {*np.asarray(every.tensor).tolist()} == {1, 2, 4, 8}
    assert {each.candidate.pipe for each in plan.best} == {1, 2, 4}
    assert {each.candidate.zero for each in plan.best} == {0, 1, 2, 3}


@pytest.mark.full
def test_slow_links_make_what_moves_least_the_first():
    """On a network that is the bottleneck, ZeRO inside of nodes moves less between them than over all devices."""
    plan = search(question(VIT, "model.dim=1024", "model.heads=16", devices=16, between="0.5GB"))
    first = plan.best[0].candidate
    assert first.data > 1 or first.zero < 3


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("text", [VIT, pytest.param(CONV, marks=pytest.mark.slow)], ids=["vit", "resnet"])
def test_a_planned_job_can_be_made_and_is_what_was_planned(text):
    job, plan = loads(text), search(question(text))
    for each in plan.best:
        made = apply_layout(job, each.candidate, 1)
        assert (made.parallel.data, made.parallel.fsdp) == (each.candidate.data, each.candidate.fsdp)
        assert made.train.accumulate == each.candidate.microbatches


OWN = """
import jax.numpy as jnp
from flax import linen as nn, nnx

class Net(nnx.Module):
    def __init__(self, rngs, width=256):
        self.one = nnx.Linear(64, width, rngs=rngs)
        self.two = nnx.Linear(width, 10, rngs=rngs)
    def __call__(self, x):
        return self.two(nnx.relu(self.one(x.reshape(x.shape[0], -1))))

class Old(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1))))

def mean(model, batch):
    return jnp.mean((model(batch["inputs"]) - 1.0) ** 2)

def total(model, batch):
    error = (model(batch["inputs"]) - 1.0) ** 2
    return jnp.sum(error), error.size

def blind(model, batch):
    return jnp.sum(model(jnp.ones((1, 8, 8)))), 1

def broken(model, batch):
    return model(batch["images"]), 1
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    module = f"own_{tmp_path.name}"  # Python keeps what it once imported
    (tmp_path / f"{module}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def job(loss="total", model="Net"):
        text = f'[model]\nname = "{module}:{model}"\n[data]\nsource = "digits"\n[train]\nglobal_batch = 64\n'
        (tmp_path / "own.toml").write_text(text + f'loss = "{module}:{loss}"\n')
        return "own.toml"

    return job


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["Net", pytest.param("Old", marks=pytest.mark.slow)])
def test_a_model_of_the_users_own_is_planned_written_and_drawn(own, model, capsys):
    words = ["--write", "planned.toml", "--html", "plan.html", "--json", "plan.json", "--advise"]
    assert main(["plan", own(model=model), "--devices", "8", *words]) == 0
    said = capsys.readouterr().out
    assert "examples per step" in said
    assert "of 1 rows" not in said
    assert "remat all_dots, dots, full: " in said
    assert "microbatches" not in said.partition("Not among them:")[2].partition("\n\n")[0]
    best = json.loads(Path("plan.json").read_text())["best"]
    assert {each["remat"] for each in best} == {"none"}  # it places none
    page = Path("plan.html").read_text()
    assert "examples per second" in page
    assert "Not weighed: pipe: " in page
    assert "Net has no stack of layers" in page or "Old has no stack of layers" in page
    assert main(["check", "planned.toml"]) == 0


@pytest.mark.nightly
def test_a_mean_has_no_microbatches(own):
    text = Path(own("mean")).read_text()
    plan = search(question(text), top=100)
    assert {each.candidate.microbatches for each in plan.best} == {1}
    assert len(search(question(Path(own("total")).read_text())).points.seconds) > len(plan.points.seconds)
    assert "microbatches: the loss is a mean" in " ".join(plan.to_dict()["left_out"])


def test_what_fsdp_would_split_nothing_of_is_left_out_by_name(own):
    plan = search(question(Path(own()).read_text(), "train.global_batch=63", devices=7), top=100)
    assert {each.candidate.fsdp for each in plan.best} == {1}
    assert any("fsdp=7 does nothing" in each for each in plan.question.exclusions)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("loss", "words", "got"),
    [
        ("blind", [], "keeps nothing of a row"),
        ("broken", [], "images"),
        ("total", ["--devices", "7"], "7 devices for 64 examples"),
        ("total", ["--devices", "65536"], "65,536 devices for 64 examples"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(own, loss, words, got, capsys):
    assert main(["plan", own(loss), "--devices", "8", *words]) == 1
    said = capsys.readouterr().err
    assert got in said
    assert said.count("fix") <= 1
    assert "Traceback" not in said


def test_a_decoder_in_float32_is_refused_with_the_way_out(capsys):
    assert main(["plan", "configs/quickstart.toml", "--devices", "8"]) == 1
    assert "train.precision=bf16" in capsys.readouterr().err
    assert main(["plan", "configs/quickstart.toml", "--devices", "8", "train.precision=bf16"]) == 0


def test_more_of_anything_is_never_cheaper():
    model = question(VIT).model
    every = model.legal(devices=8, rows=64, choices=Choices())
    bytes_, seconds = model.costs(JAXPAR).memory(every), model.costs(JAXPAR).time(every, HARDWARE["h100"])
    assert np.isfinite(seconds.total).all()
    assert (bytes_.total > 0).all()
    full, none = every.remat == "full", every.remat == "none"
    assert (seconds.total[full] > seconds.total[none]).all()
    assert (bytes_.activations[full] < bytes_.activations[none]).all()


@pytest.mark.full  # four layouts, of which each is compiled whole
def test_predicted_and_compiled_are_close_on_layouts_drawn_by_chance(tmp_path):
    out = tmp_path / "layouts.json"
    words = ["model.layers=4", "model.dim=512", "model.heads=8", "train.precision=bf16", "train.global_batch=2048"]
    found = ["configs/digits.toml", "--devices", "8", "--count", "4", "--json", str(out), *words]
    assert bench("layouts", found) == 0  # rank correlation at least 0.9
    assert json.loads(out.read_text())["agreement"]["layouts"] == 4


class OneBuffer(nnx.Module):
    """A mixture that scatters the tokens of all examples to one buffer per expert."""

    def __init__(self, rngs, dim=128, experts=4):
        self.gate = nnx.Linear(dim, experts, rngs=rngs)
        self.expert = nnx.Param(jax.random.normal(rngs.params(), (experts, dim, dim)))

    def __call__(self, x):
        rows = x.reshape(-1, x.shape[-1])
        choice = jnp.argmax(self.gate(rows), -1)
        chosen = jax.nn.one_hot(choice, 4, dtype=jnp.int32)
        place = (jnp.cumsum(chosen, 0) * chosen).sum(-1) - 1
        slots = jnp.zeros((4, rows.shape[0], x.shape[-1])).at[choice, place].add(rows)
        return jnp.einsum("ecd,edf->ecf", slots, self.expert[...])[choice, place].reshape(x.shape)


def test_a_sum_over_the_examples_of_the_whole_batch_is_said():
    """Such a mixture was planned at 5.3 ms without a word, and its program replayed at 174 ms."""

    def mean(model, batch):
        return jnp.mean(model(batch["x"]).astype(jnp.float32) ** 2)

    step = jp.train_step(jp.compose(OneBuffer, jp.Parallel(), jax.devices()[:1]), mean, optax.adam(1e-3))
    plan = jp.plan(step, {"x": jax.ShapeDtypeStruct((8, 512, 128), "float32")}, devices=8)
    (sentence,) = (text for text in plan.exclusions if text.startswith("sums over examples: "))
    assert "test_traced.py:" in sentence
    norm = jp.train_step(jp.compose(partial(Normed, dim=128), jp.Parallel(), jax.devices()[:1]), mean, optax.adam(1e-3))
    plan = jp.plan(norm, {"x": jax.ShapeDtypeStruct((8, 512, 128), "float32")}, devices=8)
    assert not [text for text in plan.exclusions if text.startswith("sums over examples: ")]


class Normed(nnx.Module):
    """A matmul after the means of a batch norm, which are sums over examples too, but small."""

    def __init__(self, rngs, dim):
        self.norm, self.out = nnx.BatchNorm(dim, rngs=rngs), nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


def gathered_arrays(function, params, width, kept):
    """How many arrays of a layer are gathered at the fullest moment, one row being small beside each of them."""
    program = traced(function, params, (width,)).programs["none"]
    return program.peak(1, gradients=0, gathered=kept)["weights"] / (4 * width**2)


def test_shards_are_gathered_for_a_pass_or_from_their_first_to_their_last_matmul():
    def unrolled(remat, p, x):
        for name in ("one", "two", "three"):
            x = jnp.sin(x @ p[name])
        return jnp.sum(x)

    def scanned(remat, p, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, p["stack"])[0])

    arrays = shapes(**dict.fromkeys(("one", "two", "three"), (64, 64)))
    assert gathered_arrays(unrolled, arrays, 64, "pass") == 1
    assert gathered_arrays(unrolled, arrays, 64, "step") == 2  # the batch has no gradient, which would read the first
    assert gathered_arrays(scanned, shapes(stack=(8, 64, 64)), 64, "pass") == 1
    assert gathered_arrays(scanned, shapes(stack=(8, 64, 64)), 64, "step") == 8


def test_a_gradient_is_whole_until_it_is_scattered():
    def function(remat, p, x):
        return jnp.sum(jnp.sin(x @ p["one"]) @ p["two"])

    program = traced(function, shapes(one=(64, 1024), two=(1024, 1024)), (64,)).programs["none"]
    peak = program.peak(1, weights=0, gradients=0.125, combined=SCATTERED)
    assert peak["gradients"] == pytest.approx(4 * 1024**2, rel=0.1)
    assert program.peak(1, weights=0, gradients=1.0)["gradients"] == 4 * (1024 + 64) * 1024


def test_attention_weights_are_kept_until_the_values_gradient_runs_last_in_a_backward_loop():
    """XLA computes it after those of queries and keys, so that four arrays of scores are live."""

    def function(remat, p, x):
        def layer(x, w):
            query, key, values = (x @ w[number] for number in range(3))
            weights = jax.nn.softmax(jnp.einsum("rsd,rtd->rst", query, key).astype(jnp.float32)).astype(x.dtype)
            return x + jnp.einsum("rst,rtd->rsd", weights, values), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, p["stack"])[0])

    program = traced(function, shapes(stack=(2, 3, 8, 8)), (256, 8)).programs["none"]
    scores = 4 * 256 * 256
    live = program.peak(1000, weights=0, gradients=0)["activations"] / (1000 * scores)
    assert 4 < live < 4.5


def activations_of(function, params, row, rows=1000):
    """Returns the most activations that are live at once, in float32 elements of a row."""
    program = traced(function, params, row).programs["none"]
    return program.peak(rows, weights=0, gradients=0)["activations"] / (4 * rows)


def test_an_elementwise_result_takes_the_place_of_a_matmuls():
    def product(after):
        def function(remat, p, x):
            return jnp.sum(after(x @ p["one"]) @ p["two"])

        return activations_of(function, shapes(one=(8, 1024), two=(1024, 8)), (8,))

    assert product(lambda y: y + jnp.sin(y)) == pytest.approx(2 * 1024, rel=0.05)  # with what is kept for its gradient
    other_order = product(lambda y: jnp.flip(y, -1) + jnp.sin(y))
    assert other_order == pytest.approx(3 * 1024, rel=0.05)


def test_a_convolutions_result_is_in_a_tuple_that_nothing_is_written_over():
    def convolve(p, x):
        return jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def convolution(remat, p, x):
        return jnp.sum(convolve(p["two"], jnp.sin(convolve(p["one"], x))))

    def product(remat, p, x):
        return jnp.sum(jnp.sin(x @ p["one"][0, 0]) @ p["two"][0, 0])

    params = shapes(one=(1, 1, 8, 1024), two=(1, 1, 1024, 8))
    assert activations_of(convolution, params, (4, 4, 8)) > activations_of(product, params, (4, 4, 8))


def test_a_forward_matmul_does_not_wait_for_a_gradient_that_reads_the_same_array():
    def function(weight, x):
        return jnp.sum(jnp.sin(x @ weight))

    weight = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    program = read_program(lambda rows: jax.make_jaxpr(jax.grad(function))(weight, jnp.zeros((rows, 8))).jaxpr, name="")
    gradients = [entry for entry in program.outputs if entry is not None]
    fused = fuse(program, 64, gradients=gradients)
    backward = [kernel.place for kernel in fused.kernels if kernel.op.matmul][-1]
    assert run_places(program, fused, gradients, 64, SCATTERED, in_backward_loop=False) == {backward: backward}


def test_zeros_are_made_early_where_the_update_takes_more_than_the_program():
    """XLA then takes the order of its list scheduler: the zeros of a table's gradient wait for the whole program."""

    def function(remat, p, x):
        rows = p["table"][(x[:, 0] * 7).astype(jnp.int32)]
        return jnp.sum(jnp.sin(jnp.sin(rows @ p["wide"]) @ p["narrow"]))

    params = shapes(table=(10_000, 16), wide=(16, 4096), narrow=(4096, 16))
    program = traced(function, params, (1,)).programs["none"]

    def most(rows, updated):
        return sum(program.peak(rows, weights=0, updated=updated).values())

    assert most(16, 2**21) > 1.2 * most(16, 0)
    assert most(1000, 2**21) == most(1000, 0)  # more than the update writes


def test_a_scatter_into_an_activation_makes_no_zeros():
    def function(remat, p, x):
        hidden = jnp.sin(x @ p["one"]).at[:, 3].add(x[:, 0])
        return jnp.sum(jnp.sin(hidden @ p["two"]))

    program = traced(function, shapes(one=(8, 1024), two=(1024, 8)), (8,)).programs["none"]
    assert program.peak(64, updated=2**30) == program.peak(64)


@pytest.mark.parametrize(("dtype", "arrays"), [(jnp.float32, 1), (jnp.bfloat16, 1.5)])
def test_only_a_result_of_as_many_bytes_takes_the_place_of_an_operand(dtype, arrays):
    def function(remat, p, x):
        return jnp.sum((x @ p["one"]).astype(dtype) @ p["two"].astype(dtype))

    assert activations_of(function, shapes(one=(8, 1024), two=(1024, 8)), (8,)) == pytest.approx(1024 * arrays, rel=0.2)


@pytest.mark.parametrize("reduced", [False, True])
def test_a_result_that_a_reduction_reads_at_once_comes_in_a_tuple(reduced):
    """XLA merges the two kernels, and writes over no part of a tuple."""

    def function(x, wide, narrow):
        product = (x @ wide) * (x @ (wide + 1))
        small = jnp.max(product, -1) if reduced else x[:, 0]
        total = product @ narrow
        for _ in range(8):  # the last reader is not near the reduction
            total = jnp.sin(total) * 2
        return (product * product + 1) @ narrow, total, small

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 1024), (1024, 8))]
    program = read_program(lambda rows: jax.make_jaxpr(function)(jnp.zeros((rows, 8)), *shapes).jaxpr, name="")
    fused = fuse(program, 64)
    lives = {
        entry: (kernel.place, max([kernel.place, *(k.place for k in fused.kernels if entry in k.leaves)]))
        for kernel in fused.kernels
        for entry in kernel.op.outputs
    }
    wide = [
        entry
        for entry in results_over_operands(program, fused, lives, ())
        if value(program.sizes[entry], 1) == 4 * 1024 and lives[entry][0] > 4
    ]
    assert len(wide) == (not reduced), [(kernel.place, kernel.op.name, kernel.leaves) for kernel in fused.kernels]


def test_gradients_count_in_the_dtype_of_their_matmul():
    def loss(model, batch):
        losses = (model(batch["x"]) - batch["y"]) ** 2
        return jnp.sum(losses), losses.size

    batch = {key: jax.ShapeDtypeStruct((8, 512), "float32") for key in "xy"}
    layout = jp.compose(lambda rngs: nnx.Linear(512, 512, use_bias=False, rngs=rngs), jp.Parallel(), jax.devices()[:1])
    found = []
    for precision in ("fp32", "bf16"):
        step = jp.train_step(layout, loss, optax.adamw(1e-3), precision=precision)
        costs = jp.plan(step, batch, devices=1).question.costs
        found.append(float(costs.memory(Candidate(data=1, microbatch=8, remat="none")).gradients))
    assert found == [4 * 512**2, 2 * 512**2]
