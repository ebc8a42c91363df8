"""Every form of context parallelism in a plan: what travels, what is kept, and from where on a ring is faster."""

import shlex
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from pairwise import some

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import load
from jaxpar.job.inspect import observe
from jaxpar.job.plan import apply_layout, command, overrides, question
from jaxpar.mesh.target import missing_plugin
from jaxpar.models.blocks import kernel as block_kernel
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.settings.computing import Logits
from jaxpar.parallel.layout import per_device
from jaxpar.parallel.techniques.base import AttentionCall
from jaxpar.parallel.techniques.context import training_bytes
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.kernels import CUDNN
from jaxpar.plan.machine.software import JAXPAR, JAXPAR_FUSED, TORCHTITAN
from jaxpar.plan.model import ring_attention
from jaxpar.plan.model.layer_bytes import logit_chunks
from jaxpar.plan.model.layer_time import attention, block
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.pages.html import write as html
from jaxpar.plan.pages.terminal import page
from jaxpar.plan.search import describe, predict, search
from jaxpar.plan.techniques.auto_context import choose_form
from jaxpar.plan.techniques.context import LayerAttention, gather_collectives
from jaxpar.plan.techniques.context import ring_collectives as of_row
from jaxpar.plan.techniques.crossover import crossover, layer_seconds
from jaxpar.plan.techniques.table import collectives

LLAMA = Shape(layers=1, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=32768, gated=True)
JOB = "configs/gpu_llama_8b_128k_context8.toml"
FORMS = {"gather": ("gather", 1), "ring": ("ring", 1), "ulysses": ("ulysses", 8), "both": ("ring", 2)}
gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")


def form(name, **more):
    by, ulysses = FORMS[name]
    return Candidate(context=8, context_by=by, ulysses=ulysses, **more)


def wire(entries):
    found = Counter()
    for each in entries:
        found[each.kind, each.dtype] += each.step_wire
    return found


@pytest.mark.parametrize("name", FORMS)
def test_a_plan_names_the_collectives_that_compiled_programs_are_held_to(name):
    row = LayerAttention(seq=LLAMA.seq, heads=32, kv_heads=8, head_dim=128, context=8, ulysses=FORMS[name][1])
    want = wire(gather_collectives(row) if name == "gather" else of_row(row))
    got = wire(each for each in collectives(LLAMA, form(name), JAXPAR) if each.axes == ("context",))
    assert got == pytest.approx(want)


@pytest.mark.parametrize("ring", [1, 2, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_and_the_share_of_the_square_are_those_of_the_tables(ring, causal):
    ulysses, shape = 8 // ring, replace(LLAMA, causal=causal)
    one = Candidate(context=8, context_by="ring" if ring > 1 else "ulysses", ulysses=ulysses)
    chunks = 2 * ring if causal and ring > 1 else ring
    at_most = block_kernel.max_block_sizes(shape.seq // ring, 128)
    of_q, of_k = (block_kernel.Blocks.split(shape.seq // chunks, most) for most in at_most)
    own = len(block_kernel.pairs(AttentionMask(causal), of_q, of_k))
    full = of_q.count * of_k.count
    walked = own if chunks == 1 else (2 * own + full + (ring - 1) * 2 * full if causal else ring * full)
    assert ring_attention.pairs(shape, one) == walked
    square = shape.seq / ring * shape.seq / of_q.size / of_k.size
    assert ring_attention.computed_share(shape, one) == pytest.approx(walked / square)
    assert tuple(map(int, ring_attention.blocks(shape, one))) == (of_q.size, of_k.size)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_plan_has_blocks_of_the_size_that_programs_have(head_dim):
    assert (ring_attention.BLOCK, ring_attention.LEAST, ring_attention.SHARE) == (
        block_kernel.BLOCK,
        block_kernel.LEAST,
        block_kernel.SHARE,
    )
    for tokens in (1, 3, 100, *(int(1000 * 1.5**n) for n in range(20))):
        assert tuple(ring_attention.largest_block(tokens, head_dim)) == block_kernel.max_block_sizes(tokens, head_dim)


def crossing(shape, far, hardware, software):
    """Returns where the modelled times cross, by halving; None where they do not below two million tokens."""

    def slower(seq):
        row = replace(shape, seq=int(seq))
        near = replace(far, context_by="gather", ulysses=1)
        return layer_seconds(row, far, hardware, software) >= layer_seconds(row, near, hardware, software)

    grid = np.geomspace(512, 2**21, 64)
    last = max((i for i, seq in enumerate(grid) if slower(seq)), default=None)
    if last is None or last == len(grid) - 1:
        return None
    low, high = grid[last], grid[last + 1]
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if slower(middle) else (low, middle)
    return high


# blocks as XLA compiles them, and cuDNN's kernel, whose scores stay on chip
PROGRAMS = {"compiled": JAXPAR, "kernel": JAXPAR_FUSED}
CASES = [
    (program, chip, size, remat)
    for program in PROGRAMS
    for chip in ("h100", "a100")
    for size in (2, 8, 16)
    for remat in ("none", "full")
]


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "chip", "size", "remat"),
    some(
        CASES,
        [("compiled", "h100", 8, "full"), ("kernel", "h100", 8, "full")],
        [("compiled", "h100", 16, "none"), ("kernel", "a100", 2, "none")],
    ),
)
def test_the_modelled_times_cross_where_the_formula_says(program, chip, size, remat):
    far, software = Candidate(context=size, context_by="ring", remat=remat), PROGRAMS[program]
    found = crossing(LLAMA, far, HARDWARE[chip], software)
    formula = crossover(LLAMA, far, HARDWARE[chip], software)
    if program == "compiled" and found is None:
        assert formula > 2**20  # as good as never: gathered keys are faster wherever they fit
        return
    assert found is not None
    assert formula == pytest.approx(found, rel=0.1)


def asked(seq, *words, devices=8, attention="fused"):
    job = load(JOB, [f"data.seq={seq}", *words])
    return job, question(job, devices=devices, chip="h100", per_node=None, options={"attention": attention})


def test_keys_are_gathered_below_the_crossover_and_go_around_above():
    software = PROGRAMS["kernel"]
    at = crossover(LLAMA, form("ring", remat="full"), HARDWARE["h100"], software)
    for seq, first in ((at / 2, "gather"), (2 * at, "ring")):
        _, one = asked(int(seq) // 16 * 16)
        one = replace(one, software=software)
        each = {name: predict(one, form(name, remat="full", zero=3, zero_context=True)).time.total for name in FORMS}
        assert each[first] == min(each["gather"], each["ring"])


def test_a_plan_tries_every_form_of_long_rows_and_writes_the_job_that_runs_it():
    job, one = asked(131072)
    plan = search(one, top=40)
    forms = {(each.candidate.context_by, each.candidate.ulysses) for each in plan.best if each.candidate.context == 8}
    assert {("ring", 1), ("ring", 2), ("ulysses", 8)} <= forms
    assert not any(
        each.candidate.context > 1 and each.candidate.context_by == "gather" for each in plan.best
    )  # no room
    (ring,) = [each for each in plan.best if (each.candidate.context, each.candidate.ulysses) == (8, 1)]
    assert describe(ring.candidate).startswith("context 8 (ZeRO-3 over fsdp x context), context by ring")
    made = apply_layout(job, ring.candidate, 32)
    assert replace(made.parallel, zero=None) == job.parallel
    both = next(
        each.candidate for each in plan.best if (each.candidate.context_by, each.candidate.ulysses) == ("ring", 2)
    )
    assert {"parallel.context_by=ring", "parallel.ulysses=2"} <= {*overrides(both, 32)}


def test_a_printed_command_takes_back_the_form_that_its_job_has():
    """A job by a ring, planned without one: as it stands, `context_by` with context=1 would be refused."""
    job, _ = asked(131072)
    words = printed(job, Candidate(fsdp=8, zero=3))
    assert {"parallel.context_by=gather", "parallel.zero_over=fsdp"} <= {*words}
    assert load(JOB, words).parallel.context == 1
    both = printed(job, form("both", zero=3, zero_context=True))
    made = load(JOB, ["data.seq=131072", "model.seq=131072", *both]).parallel
    assert (made.context_by, made.ulysses, made.zero_over) == ("ring", 2, "fsdp x context")


def printed(job, candidate):
    """Returns the overrides of the command that a plan prints."""
    return shlex.split(command("job.toml", [], job, apply_layout(job, candidate, 32)))[3:]


def call(**more):
    return AttentionCall(
        **({"sequences": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True, "context": 8} | more)
    )


def test_auto_takes_the_fastest_form_whose_scores_fit_and_says_why_with_figures():
    short, long = (
        choose_form(call(seq=seq, chip="h100", state_bytes=15 * 2**30, kernel="plain")) for seq in (16384, 131072)
    )
    assert short.context_by == "gather"
    assert (long.context_by, long.ulysses) == ("ring", 1)
    assert "context by auto: ring, for rows of 131,072 tokens on NVIDIA H100 SXM: a layer takes gather" in long.why
    assert "(modelled, in blocks of plain JAX: as asked); scores of a layer that gathers are 384 GiB" in long.why
    assert "384 GiB, which do not fit beside a state of 15 GiB" in long.why
    assert "which fit" in short.why


def test_auto_prices_the_kernel_where_a_run_has_it_and_blocks_where_it_has_not():
    """Under a window heads for tokens have it, and rings do not."""
    by_kernel, in_blocks = choose_form(call(seq=32768)), choose_form(call(seq=32768, kernel="plain"))
    assert by_kernel.context_by != "gather" == in_blocks.context_by
    assert "in cuDNN's kernel, as on a GPU where it passes its trial" in by_kernel.why
    for lacks, why in (
        ({"dtype": "float32"}, "it computes in 16 bits, not in float32"),
        ({"segments": True}, "it is given no segments of packed documents"),
        ({"head_dim": 20}, "it has no heads of 20"),
        ({"chip": "a100", "head_dim": 256}, "it has no heads of 256"),
    ):
        assert f"(modelled, in blocks of plain JAX: {why})" in choose_form(call(seq=32768, **lacks)).why
    assert "it has no heads" not in choose_form(call(seq=32768, chip="h100", head_dim=256)).why
    assert "these devices are no GPUs" in choose_form(call(seq=32768, chip="v5p")).why
    mixed = choose_form(call(seq=32768, window=1024))
    assert mixed.context_by == "ulysses"
    assert "(modelled, ulysses in cuDNN's kernel, as on a GPU where it passes its trial, others in blocks" in mixed.why


def test_auto_with_the_kernel_asked_for_takes_a_form_that_has_it_or_refuses():
    """Gathered keys have none: a choice of them would leave out what was asked for."""
    free, asked = (choose_form(call(seq=1024, kernel=kernel)) for kernel in ("auto", "cudnn"))
    assert free.context_by == "gather"
    assert asked.context_by != "gather"
    assert asked.why.endswith("; gather is left out, as context_kernel='cudnn' cannot run it")
    with pytest.raises(JaxparError, match=r"for q bfloat16.*: ring: it has no heads of 20; .*\n.*not gather"):
        choose_form(call(seq=32768, kernel="cudnn", head_dim=20))
    with pytest.raises(JaxparError, match="no form but gather divides the tokens and heads"):
        choose_form(replace(call(seq=1001, kernel="cudnn"), heads=7, kv_heads=7))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["ring", "both", "ulysses"])
def test_a_plan_prices_the_kernel_by_its_share_of_the_peak_and_blocks_where_those_run(name, causal):
    shape, chip, one = replace(LLAMA, causal=causal), HARDWARE["h100"], form(name)
    flop = 4 * shape.seq**2 * shape.dim / 8 / (2 if causal else 1)
    ring = 8 // FORMS[name][1]
    ahead, back = attention(shape, one, chip, JAXPAR_FUSED)
    share = CUDNN.peak_shares("h100", shape.seq // ring, 128, default=(1.0, 1.0))
    assert ahead == pytest.approx(flop / chip.chip.bf16_flops / share[0], rel=1e-3)
    assert back == pytest.approx(2.5 * flop / chip.chip.bf16_flops / share[1], rel=1e-3)
    blocks = [
        layer_seconds(shape, one, chip, software) for software in (JAXPAR, replace(JAXPAR_FUSED, ring_kernel=None))
    ]
    assert blocks[0] == blocks[1] > 1.5 * layer_seconds(shape, one, chip, JAXPAR_FUSED)
    cut = replace(one, tensor=16)  # of 8 heads of keys
    assert ring_attention.uses_kernel(shape, one, JAXPAR_FUSED)
    assert not ring_attention.uses_kernel(shape, cut, JAXPAR_FUSED)
    assert not ring_attention.uses_kernel(shape, one, JAXPAR)


def test_a_plan_of_a_job_prices_and_says_what_runs_its_pieces_and_the_job_that_it_writes_has_it():
    ring, taken = form("ring", remat="full", zero=3, zero_context=True), {}
    for words, said in (
        ((), "for pieces that travel the kernel, in parts"),
        (
            ("parallel.context_kernel=plain",),
            "travel blocks of plain JAX (parallel.context_kernel = 'plain')",
        ),
        (
            ("data.documents=apart",),
            "travel blocks of plain JAX (it is given no segments of packed documents)",
        ),
        (("model.heads=256", "model.kv_heads=8"), "for pieces that travel the kernel, in parts"),
        (("parallel.context_kernel=cudnn",), "for pieces that travel the kernel, in parts"),
    ):
        job, one = asked(32768, *words)
        assert said in one.costs.attention
        taken[words] = predict(one, ring).time.total
        assert apply_layout(job, ring, 32).parallel.context_kernel == job.parallel.context_kernel
        assert not any("context_kernel" in word for word in printed(job, ring)), "the job has it"
        kernel = job.parallel.context_kernel
        back = [word for word in printed(job, Candidate(fsdp=8, zero=3)) if "context_kernel" in word]
        assert back == ["parallel.context_kernel=auto"] * (kernel != "auto")
    blocks = predict(asked(32768, attention="unfused")[1], ring).time.total
    assert taken["parallel.context_kernel=plain",] == taken["data.documents=apart",] == blocks > 1.2 * taken[()]
    with pytest.raises(JaxparError, match=r"a plan with parallel.context_kernel = 'cudnn': it has no heads of 4"):
        asked(32768, "parallel.context_kernel=cudnn", "model.heads=1024")


def test_auto_counts_the_gradients_and_moments_of_what_is_trained_as_the_stage_cuts_them():
    model = partial(jp.Decoder, jp.DecoderConfig(vocab=32, seq=32, layers=1, dim=16, heads=2))
    all_, zero = (jp.compose(model, jp.Parallel(context=2, **how), 8) for how in ({"data": 4}, {"fsdp": 4, "zero": 1}))
    size = per_device(all_, all_.placements)
    assert training_bytes(all_) == 4 * size
    assert training_bytes(zero) == size + 3 * per_device(zero, zero.placements)  # gradients are whole
    assert training_bytes(replace(all_, frozen=frozenset(all_.placements))) == size


@pytest.mark.parametrize("seq", [4096, 32768, 131072])
def test_auto_is_the_same_where_the_chip_is_and_says_which_one_it_assumes(seq):
    known, assumed, other = (choose_form(call(seq=seq, chip=chip)) for chip in ("h100", "", "a40"))
    assert (
        (known.context_by, known.ulysses) == (assumed.context_by, assumed.ulysses) == (other.context_by, other.ulysses)
    )
    assert "NVIDIA H100 SXM: " in known.why
    assert "NVIDIA H100 SXM, assumed, as no chip is named" in assumed.why
    assert "NVIDIA H100 SXM, assumed, as a40 is not planned for" in other.why


def test_the_last_matmul_of_a_layer_is_not_computed_again():
    """The compiled backward pass makes gate and up again, and not down: nobody reads its result."""
    chip, one = HARDWARE["h100"], form("gather", remat="full")
    forward, _, again = block(LLAMA, one, chip, JAXPAR)
    down = chip.matmul(LLAMA.seq / 8, LLAMA.hidden, LLAMA.dim)
    assert again.matmuls == pytest.approx(forward.matmuls - down)
    assert again[1:] == forward[1:]
    theirs = block(LLAMA, one, chip, TORCHTITAN)  # checkpoints of PyTorch's make all of it again
    assert theirs[2].matmuls == theirs[0].matmuls
    assert block(LLAMA, replace(one, remat="dots"), chip, JAXPAR)[2].matmuls == 0


@gpu_compiler
@pytest.mark.full
@pytest.mark.parametrize("seq", [8192, 16384])
def test_gathered_keys_of_an_8b_model_take_as_long_as_compiled(seq):
    job, one = asked(seq, "parallel.context_by=gather")
    found = observe(job, job.mesh.target)
    assert found.timeline is not None
    predicted = predict(one, form("gather", remat="full", zero=3, zero_context=True)).time
    assert predicted.total == pytest.approx(found.timeline.seconds, rel=0.15)


@gpu_compiler
@pytest.mark.full
@pytest.mark.parametrize("seq", [16384, 32768, 131072])
def test_hops_hide_behind_the_turns_of_an_8b_model_as_compiled(seq):
    """In blocks of plain JAX: where no GPU is, no program has cuDNN's kernel."""
    job, one = asked(seq, attention="unfused")
    found = observe(job, job.mesh.target)
    assert found.fits
    assert found.timeline is not None
    assert found.timeline.exposed["context"] <= 0.05 * found.timeline.seconds
    predicted = predict(one, form("ring", remat="full", zero=3, zero_context=True)).time
    assert predicted.total == pytest.approx(found.timeline.seconds, rel=0.15)
    assert predicted.context <= 0.05 * predicted.total


@pytest.mark.slow
def test_a_check_refuses_scores_that_no_device_holds_and_says_how_many_bytes_they_are(capsys):
    """[1, 32, 131072 / 8, 131072] in float32."""
    assert main(["check", JOB, "parallel.context_by=gather"]) == 1
    said = capsys.readouterr().err
    assert "a device holds parameters 3.739 GiB and optimizer state 7.479 GiB and scores of attention" in said
    assert "256 GiB" in said
    assert "parallel.context_by = 'ring', which keeps no scores" in said
    assert main(["check", JOB]) == 0
    capsys.readouterr()
    assert main(["check", JOB, "parallel.context_by=auto"]) == 0
    assert "context by auto: ulysses, for rows of 131,072 tokens on NVIDIA H100 SXM: a layer" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [2**13, 2**14, 2**17])
def test_a_plan_counts_logits_in_as_many_chunks_as_a_step_makes(tokens):
    made = Logits(tokens, 128256)
    assert logit_chunks(tokens, 128256, JAXPAR) == pytest.approx(made.chunks, rel=0.1)
    whole = replace(JAXPAR, run="asynchronous", split_sequences=None)
    assert logit_chunks(tokens, 128256, whole) == 1


@pytest.mark.slow
def test_a_plan_of_a_job_that_offloads_says_what_is_on_the_host_and_its_time():
    """32 layers with inputs of 16,384 tokens x 4,096 in bf16: 4 GiB, one of which stays on the device at a time."""
    job = load(JOB, ["train.remat=offload"])
    one = question(job, devices=8, chip="h100", per_node=None, options={})
    remats = one.legal()
    assert set(remats.remat[remats.pipe > 1]) == set(remats.remat) - {"offload"}
    full, away = (predict(one, form("ring", remat=remat, zero=3, zero_context=True)) for remat in ("full", "offload"))
    assert one.costs.host_bytes(away.candidate) == 4 * 2**30
    assert one.costs.host_bytes(full.candidate) == 0
    assert full.memory.activations - away.memory.activations == pytest.approx(4 * 2**30 * 31 / 32)
    assert away.time.host == 0  # a layer of 131,072 tokens takes far longer than its input
    slow = replace(one.hardware, chip=replace(one.hardware.chip, pcie=1e6))
    waits = predict(replace(one, hardware=slow), away.candidate).time.host
    assert waits == pytest.approx(2 * 4 * 2**30 / 1e6 / 0.82, rel=0.05)
    found = search(replace(one, choices=Choices(remats=("offload",))), top=40)
    shown, said = page(found), "4 GiB per device, 81.8 ms each way over PCIe, 0 ms of it waited for"
    assert "In host memory:" in shown
    assert said in shown
    assert said in html(found, title="a plan")
    rows = {each["context_by"]: each["host"] for each in found.to_dict()["best"] if each["context"] == 8}
    assert rows["ring"] == {"bytes": 4 * 2**30, "seconds_each_way": pytest.approx(0.0818, rel=1e-3)}
    plain = search(asked(131072)[1], top=1)
    assert "In host memory" not in html(plain, title="a plan")
    assert "host" not in plain.to_dict()["best"][0]
    assert "offload" not in set(asked(131072)[1].legal().remat)
