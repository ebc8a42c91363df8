"""A profile has exactly the steps that it names; its page counts kernels by kind, and shows no times of processors."""

import gzip
import io
import json
import re

import jax
import pytest
from test_metrics import folder, job, rows  # noqa: F401
from test_run_page import run_folder

from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.report import kernel_times
from jaxpar.job.report.page import render
from jaxpar.job.report.read import read
from jaxpar.train.api.fit_inputs import check_profile
from jaxpar.train.step_trace import StepTrace, check_steps

STEP = "jit_"  # of the names of compiled programs in a trace


def programs(path):
    """The runs of compiled programs in a trace, by name, on one device."""
    (file,) = path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    runs = {}
    for event in events:
        args = event.get("args", {})
        if "hlo_module" in args:
            runs.setdefault(args["hlo_module"], set()).add(args.get("run_id"))
    return {name: len(ids) for name, ids in runs.items()}


@pytest.mark.slow
def test_a_job_profiles_the_steps_that_it_names_and_its_page_links_them(folder, monkeypatch):  # noqa: F811
    lines, landed, stop = io.StringIO(), [], jax.profiler.stop_trace
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: (landed.append(len(rows(folder))), stop()))
    run.train(job(folder, "train.steps=8", "train.eval_every=0", train="profile = [4, 6]"), stream=lines)
    assert "profile of steps 4 to 6: " in lines.getvalue()
    assert landed == [6]  # no step is in flight when the trace ends
    path = folder / "run" / "profile" / "steps_4_6"
    assert 3 in programs(path).values(), programs(path)
    assert max(programs(path).values()) == 3
    page = render(read(folder / "run"))
    assert 'href="profile/steps_4_6"' in page
    assert "Simulated devices share their cores" in page
    assert "Kernel time by kind" not in page


@pytest.mark.parametrize("steps", [[4], [6, 4], [0, 2], [4, 9], [4, 5, 6], [True, 3]])
def test_steps_that_are_no_range_of_the_run_are_refused(steps):
    with pytest.raises(JaxparError, match=r"first and a last step, both traced, within 1\.\.8"):
        check_steps(steps, 8, "train.profile")


def test_fit_refuses_a_profile_without_a_folder():
    with pytest.raises(JaxparError, match="written to the run folder"):
        check_profile((2, 3), 4, None)
    with pytest.raises(JaxparError, match=r"profile = \[2, 5\]"):
        check_profile((2, 5), 4, "runs/mine")


def test_a_resumed_run_traces_the_rest_of_the_steps_and_no_steps_twice(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    trace = StepTrace(tmp_path, (4, 6), say=calls.append)
    for step in (5, 6, 7, 4, 5):  # goes on from step 4, and is rolled back after step 7
        trace.begin(step, lambda: calls.append("wait"))
        if trace.ends(step):
            trace.end(step)
    trace.close()
    assert calls == ["wait", "start", "stop", f"profile of steps 5 to 6: {tmp_path / 'profile' / 'steps_4_6'}"]
    assert json.loads((tmp_path / "profile" / "steps_4_6" / "steps.json").read_text())["first"] == 5
    interrupted = StepTrace(tmp_path, (4, 6), say=calls.append)
    interrupted.begin(4, lambda: None)
    interrupted.close()
    assert calls[-2:] == ["start", "stop"]


KERNELS = {  # name and instruction to kind, as profiles of H100s show them
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce-start.1"): "all-reduce",
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather-start"): "all-gather",
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()", "reduce-scatter.2"): "reduce-scatter",
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective-permute-start"): "permute",
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>) ", "all-to-all.3"): "all-to-all",
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "custom-call.5.0"): "matrix products",
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "custom-call.1"): "matrix products",
    ("gemm_fusion_dot_1", "gemm_fusion_dot.1"): "matrix products",
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "custom-call.9"): "attention",
    ("sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16", "custom-call.2"): "convolutions",
    ("MemcpyD2D", "copy.7"): "copies",
    ("Memset", ""): "copies",
    ("loop_convert_fusion_2", "loop_convert_fusion.2"): "elementwise and reductions",
    ("input_reduce_fusion_3", "input_reduce_fusion.3"): "elementwise and reductions",
    ("wrapped_add", "wrapped_add"): "elementwise and reductions",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_has_the_kind_of_its_library(kernel):
    assert kernel_times.kind_of_kernel(*kernel) == KERNELS[kernel]


def gpu_trace(to, steps):
    """Writes a trace of two GPUs by hand: each runs every kernel of `KERNELS` for 1 ms in each of 2 steps."""
    path = to / "profile" / f"steps_{steps[0]}_{steps[1]}"
    (path / "plugins").mkdir(parents=True)
    events = [{"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "/host:CPU"}}]
    for pid in (1, 2):
        events += [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"/device:GPU:{pid - 1}"}},
            {"ph": "M", "pid": pid, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7(Compute,MemcpyD2D)"}},
            {"ph": "M", "pid": pid, "tid": 8, "name": "thread_name", "args": {"name": "XLA Ops"}},
        ]
        for name, instruction in [*KERNELS] * 2:
            event = {"ph": "X", "pid": pid, "tid": 7, "ts": 1.0, "dur": 1000.0, "name": name}
            events += [event | {"args": {"hlo_op": instruction}}, event | {"tid": 8}]  # repeated by a line of XLA
    events.append({"ph": "X", "pid": 9, "tid": 1, "ts": 1.0, "dur": 9e9, "name": "all-reduce of the host"})
    (path / "plugins" / "host.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    facts = {"first": steps[0], "last": steps[1], "seconds": 0.05}
    (path / "steps.json").write_text(json.dumps(facts))
    return path


def test_kernel_times_are_per_step_and_gpu_and_stand_beside_the_planners(tmp_path):
    to = run_folder(tmp_path / "run", devices="2 x NVIDIA H100 80GB HBM3")
    gpu_trace(to, (10, 11))
    (profile,) = read(to).profiles
    counts = {kind: list(KERNELS.values()).count(kind) for kind in KERNELS.values()}
    assert profile.kernels == {kind: pytest.approx(1e-3 * count) for kind, count in counts.items()}
    assert (profile.gpus, profile.steps, profile.seconds) == (2, 2, 0.025)
    causes = {"matmuls": 0.004, "recompute": 0.001, "attention": 0.002, "elementwise": 0.003, "sharding": 0.006}
    shown = kernel_times.render(profile, to, {"causes": causes, "seconds": 0.016})
    cells = [re.sub("<[^>]+>", "|", row) for row in re.findall(r"<tr>.*?</tr>", shown)]
    rows = {row.strip("|").split("|")[0]: [cell for cell in row.split("|") if cell] for row in cells}
    assert rows["matrix products"] == ["matrix products", "3 ms", "5 ms"]
    assert rows["all-gather"] == ["all-gather", "1 ms", "-"]
    assert rows["sharding"] == ["sharding", "-", "6 ms"]
    assert rows["a step"] == ["a step", "25 ms", "16 ms"]


def test_a_damaged_trace_is_named(tmp_path):
    to = run_folder(tmp_path / "run")
    file = next(gpu_trace(to, (10, 11)).rglob("*.gz"))
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(JaxparError, match=r"host\.trace\.json\.gz is damaged"):
        read(to)
