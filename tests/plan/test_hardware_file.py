"""A machine of the user's own: written by the benches, read by the planner, refused as a whole."""

import contextlib
import random
import tomllib
from pathlib import Path

import pytest

from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.measure.machine import links_table
from jaxpar.mesh.chip_file import load_chip
from jaxpar.mesh.chips import Link, find_chip
from jaxpar.plan.machine import hardware_file
from jaxpar.plan.machine.fit_hardware import LinkFit
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.hardware_file import load_hardware, to_toml, write_table

JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")
SLIPS = ["", "0", "-", "[", "=", '"', "\n", "e9", "{", "nan", "ü"]
EXAMPLE = (hardware_file.__doc__ or "").split("\n\n")[1]
H100 = HARDWARE["h100"]
GEMM = {key: getattr(H100.gemm, key) for key in ("top", "half", "wave", "ragged", "cores", "source")}


def links_of(machine, **more):
    pairs = {name: getattr(machine, name) for name in ("inside", "between")}
    return {"per_node": machine.per_node, "launch": machine.launch} | {
        name: {"latency": link.latency, "bandwidth": link.bandwidth} for name, link in pairs.items()
    } | {"source": "here"} | more  # fmt: skip


@pytest.fixture
def example(tmp_path):
    def written(*changes):
        changed = EXAMPLE
        for old, new in changes:
            assert old in changed
            changed = changed.replace(old, new)
        (tmp_path / "acme.toml").write_text(changed)
        return tmp_path / "acme.toml"

    return written


def test_the_example_of_the_documentation_is_a_machine(example):
    machine = load_hardware(example(), devices=64)
    assert (machine.chip.name, machine.per_node, machine.launch) == ("Acme One", 8, 1e-5)
    assert machine.inside == Link(latency=3e-6, bandwidth=80e9)
    assert machine.between == Link(latency=1e-5, bandwidth=11e9)
    assert (machine.gemm.top, machine.gemm.half) == (0.7, 5e9)


@pytest.mark.parametrize("key", sorted(HARDWARE))
def test_what_is_written_is_read_back_and_prices_alike(key, tmp_path):
    machine, path = HARDWARE[key], tmp_path / "mine.toml"
    write_table(path, "links", links_of(machine), chip=machine.chip)
    gemm = {"top": machine.gemm.top, "half": machine.gemm.half, "source": "here"}
    write_table(path, "gemm", gemm, chip=machine.chip)
    found = load_hardware(path, devices=64)
    assert (found.inside, found.between, found.launch) == (machine.inside, machine.between, machine.launch)
    assert found.chip.usable_memory == machine.chip.usable_memory
    assert found.matmuls(1e12) == machine.matmuls(1e12)
    assert found.gather(1e8, 64, 1) == machine.gather(1e8, 64, 1)
    assert find_chip(found.chip.name) is machine.chip


def test_a_table_is_replaced_and_the_rest_of_the_file_stays_to_the_letter(example):
    path = example(("[gemm]", "# mine\n[gemm]   # measured twice"))
    before = path.read_text()
    write_table(path, "gemm", {"top": 0.5, "half": 1.0, "source": 'quo"te\\ and\nline'}, chip=H100.chip)
    write_table(path, "gemm", {"top": 0.25, "half": 1.0, "source": "again"}, chip=H100.chip)
    after = path.read_text()
    assert tomllib.loads(after) == tomllib.loads(before) | {"gemm": {"top": 0.25, "half": 1.0, "source": "again"}}
    begin = before.index("[gemm]")
    assert after.startswith(before[:begin] + before[before.index("[links]") :].rstrip())
    assert [each.name for each in path.parent.iterdir()] == ["acme.toml"]


def test_what_is_written_is_toml_whatever_the_words_are():
    words = 'a "quoted" \\ back\nslash\t\x00\x7f ü 漢'
    assert tomllib.loads(to_toml("gemm", {"source": words, "top": 1e-5}))["gemm"] == {"source": words, "top": 1e-5}


def test_a_table_that_is_spread_over_the_file_is_not_replaced(example):
    path = example(
        ("inside = {latency = 3e-6, bandwidth = 80e9}", ""), ("between = {latency = 1e-5, bandwidth = 11e9}", "")
    )
    path.write_text(path.read_text() + "\n[links.inside]\nlatency = 3e-6\nbandwidth = 80e9\n")
    before = path.read_text()
    with pytest.raises(JaxparError, match=r"each table of the file is written once, in one place"):
        write_table(path, "links", links_of(H100), chip=H100.chip)
    assert path.read_text() == before
    assert load_hardware(path, devices=8).inside.bandwidth == 80e9


@pytest.mark.parametrize(("name", "bench"), [("gemm", "measure gemm"), ("links", "measure links")])
def test_a_table_that_is_missing_comes_with_the_bench_that_measures_it(example, name, bench):
    head, _, rest = EXAMPLE.partition(f"[{name}]")
    tail = "[links]" + rest.partition("[links]")[2] if name == "gemm" else ""
    path = example()
    path.write_text(head + tail)
    with pytest.raises(JaxparError) as caught:
        load_hardware(path, devices=8)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].got == f"no table [{name}] in {path}"
    assert caught.value.problems[0].fix == f"jaxpar {bench} --write {path}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("top = 0.7 ", "top = 1.7 "), "gemm.top = 1.7 in"),
        (("top = 0.7 ", "top = 0 "), "gemm.top = 0 in"),
        (("half = 5e9", "half = -1"), "gemm.half = -1 in"),
        (("half = 5e9", "half = nan"), "gemm.half = nan in"),
        (("half = 5e9", "half = true"), "gemm.half = True in"),
        (("half = 5e9", 'half = "5 GFLOP"'), "gemm.half = '5 GFLOP' in"),
        (("half = 5e9", "hlaf = 5e9"), "gemm.hlaf in"),
        (("per_node = 8", "per_node = 8.0"), "links.per_node = 8.0 in"),
        (("per_node = 8", "per_node = 0"), "links.per_node = 0 in"),
        (("per_node = 8", ""), "no links.per_node in"),
        (("launch = 1e-5", "launch = 10"), "links.launch = 10 in"),
        (("bandwidth = 80e9}", "bandwidth = 0}"), "links.inside.bandwidth = 0 in"),
        (("bandwidth = 80e9}", "bandwidth = 80}"), "links.inside.bandwidth = 80 in"),
        (("latency = 3e-6", "latency = -1e-6"), "links.inside.latency = -1e-06 in"),
        (("latency = 3e-6, ", ""), "links.inside = {'bandwidth': 80000000000.0} in"),
        (("inside = {latency = 3e-6, bandwidth = 80e9}", ""), "no links.inside in"),
        (("inside = {latency = 3e-6, bandwidth = 80e9}", "inside = 80e9"), "links.inside = 80000000000.0 in"),
        (("[gemm]", "[gem]"), "gem outside of [chip]"),
        (("bf16_flops = 400e12", "bf16_flops = 0"), "chip.bf16_flops = 0 in"),
    ],
)
def test_what_is_wrong_in_a_machine_is_said(example, change, said):
    with pytest.raises(JaxparError) as caught:
        load_hardware(example(change), devices=8)
    assert said in caught.value.problems[0].got
    assert len(caught.value.problems) == 1 + (change[1][:4] == "hlaf")


def test_all_that_is_wrong_is_said_at_once(example):
    path = example(("top = 0.7 ", "top = 7 "), ("launch = 1e-5", "launch = nan"), ("latency = 1e-5", "latency = 99"))
    with pytest.raises(JaxparError) as caught:
        load_hardware(path, devices=8)
    assert [problem.got.split(" = ")[0] for problem in caught.value.problems] == [
        "gemm.top", "links.launch", "links.between.latency",
    ]  # fmt: skip


def test_one_machine_needs_no_network_and_several_do(example):
    path = example(("between = {latency = 1e-5, bandwidth = 11e9}", ""))
    assert load_hardware(path, devices=8).between == load_hardware(path, devices=8).inside
    with pytest.raises(JaxparError, match=r"(?s)no links.between in .* for 16 devices on machines of 8.*measure links"):
        load_hardware(path, devices=16)
    with pytest.raises(JaxparError, match=r"for 8 devices on machines of 4"):
        load_hardware(path, devices=8, per_node=4)
    assert load_hardware(path, devices=16, between=2e9).between == Link(latency=1e-5, bandwidth=2e9)


def test_mutated_files_are_read_or_refused(tmp_path):
    dice, path = random.Random(0), tmp_path / "acme.toml"
    for _ in range(600):
        letters = list(EXAMPLE)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(letters))
            letters[at : at + dice.randrange(3)] = dice.choice(SLIPS)
        path.write_text("".join(letters))
        with contextlib.suppress(JaxparError):
            load_hardware(path, devices=8)


@pytest.mark.parametrize("first", ["inside", "between"])
def test_the_table_of_fits_is_one_that_is_read(first, tmp_path):
    fits = {first: LinkFit(Link(latency=0.0, bandwidth=5e10), launch=1e-5, separable=False, error=0.01, worst=0.1)}
    table = links_table(fits, 1 if first == "between" else 2, "here")
    write_table(tmp_path / "mine.toml", "links", table, chip=H100.chip)
    write_table(tmp_path / "mine.toml", "gemm", GEMM, chip=H100.chip)
    machine = load_hardware(tmp_path / "mine.toml", devices=2)
    assert (machine.inside.bandwidth, machine.launch) == (5e10, 1e-5)
    assert "do not tell launch and latency apart" in machine.source


@pytest.mark.nightly
def test_the_verb_plans_for_a_file_as_for_the_chip_in_it(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    write_table(path, "gemm", GEMM, chip=H100.chip)
    write_table(path, "links", links_of(H100), chip=H100.chip)
    pages = []
    for chip in ("h100", str(path)):
        assert main(["plan", JOB, "--devices", "64", "--top", "3", "--chip", chip]) == 0
        pages.append(capsys.readouterr().out)
    rows = [page.partition("against the first")[2].partition("Train it so")[0] for page in pages]
    assert rows[0] == rows[1]
    assert "links: here" in pages[1]


@pytest.mark.nightly
def test_one_node_is_not_told_of_a_network(example, capsys):
    path = example(("between = {latency = 1e-5, bandwidth = 11e9}", ""))
    assert main(["plan", JOB, "--devices", "8", "--chip", str(path), "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert "1 node of 8" in said
    assert "80 GB/s per GPU\n" in said
    assert "matmuls: measured on acme-3; links: measured on acme-3" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chip", "v5e"], "jaxpar measure gemm --write v5e.toml"),
        (["--chip", "v6e"], "no measured bandwidths and matmul speeds"),
        (["--chip", "v5p"], "a10, a100, b200, b300, gb200, gb300, gh200, h100, h200, l40s, mi300x, rtx4090, rtx5090"),
        (["--chip", "l40s", "--per-node", "4"], "--between 12.5GB, of one GPU's share of the network; or --per-node 8"),
        (["--chip", "h300"], "one of: a10 (24 GB), a100 (80 GB)"),
        (["--chip", "none.toml"], "the chip of none.toml: No such file"),
        (["--chip", "b200", "--verify", "1"], "--verify for NVIDIA B200 SXM"),
    ],
)
def test_chips_that_cannot_be_planned_for_are_refused_with_the_way_out(words, said, capsys):
    assert main(["plan", JOB, "--devices", "8", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("chip", "devices", "words", "machines"),
    [
        pytest.param("gb200", 144, [], "144 x NVIDIA GB200 NVL72, 2 nodes of 72", marks=pytest.mark.slow),
        pytest.param("gb200", 16, ["--per-node", "4"], "16 x NVIDIA GB200 NVL72, 4 nodes of 4", marks=pytest.mark.slow),
        pytest.param("gb300", 64, [], "64 x NVIDIA GB300 NVL72, 1 node of 72", marks=pytest.mark.slow),
        pytest.param("b300", 16, [], "16 x NVIDIA B300 SXM, 2 nodes of 8", marks=pytest.mark.slow),
        pytest.param("mi300x", 16, [], "16 x AMD Instinct MI300X, 2 nodes of 8", marks=pytest.mark.slow),
        pytest.param("l40s", 8, [], "8 x NVIDIA L40S, 1 node of 8", marks=pytest.mark.slow),
        ("l40s", 16, ["--per-node", "4", "--between", "100Gb/s"], "16 x NVIDIA L40S, 4 nodes of 4"),
        pytest.param("a10", 8, [], "8 x NVIDIA A10, 1 node of 8", marks=pytest.mark.slow),
        pytest.param(
            "rtx4090", 4, ["--per-node", "4"], "4 x NVIDIA GeForce RTX 4090, 1 node of 4", marks=pytest.mark.slow
        ),
        pytest.param(
            "gh200",
            32,
            ["--per-node", "1", "--between", "50GB"],
            "32 x NVIDIA GH200 96GB, 32 nodes of 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_chips_that_people_rent_are_planned_for_as_assumed(chip, devices, words, machines, tmp_path, capsys):
    """And the job that is written passes `check`."""
    job = [JOB.replace("8b_fsdp8", "1b3_fsdp8"), "train.global_batch=288"]
    asked = ["--devices", str(devices), "--chip", chip, *words, "--top", "1", "--write", str(tmp_path / "job.toml")]
    assert main(["plan", *job, *asked]) == 0
    said = capsys.readouterr().out
    assert machines in said
    assert "or on this chip" in said
    assert main(["check", str(tmp_path / "job.toml")]) == 0


def test_chips_without_nvlink_meet_over_pcie(example, capsys):
    path = example(("nvlink = 100e9", "nvlink = 0\npcie = 25e9"))
    chip = load_chip(path)
    assert chip.nvlink == chip.pcie == 25e9


def test_a_file_called_h100_is_not_compiled_as_one(example, capsys):
    path = example()
    path = path.rename(path.with_name("h100.toml"))
    assert main(["plan", JOB, "--devices", "8", "--chip", str(path), "--verify", "1"]) == 1
    assert "--verify for Acme One" in capsys.readouterr().err
