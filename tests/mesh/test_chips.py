"""The table of chips says what its sources say, and a chip of the user's own is read or refused as a whole."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.mesh.chip_file import KEYS, load_chip
from jaxpar.mesh.chips import CHIPS, find_chip
from jaxpar.mesh.target import Target, description, missing_plugin, parse_target

JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_1b3_fsdp8.toml")
PLANNED = [chip for chip in CHIPS if chip.gpu is None]
MINE = {
    "name": '"Acme One"', "source": '"measured"', "memory": '"64 GiB"', "bf16_flops": "400e12", "f32_flops": "50e12",
    "bandwidth": "2e12", "nvlink": "100e9", "network": "12.5e9", "pcie": "32e9", "domain": "8",
}  # fmt: skip


def test_the_table_has_the_chips_that_people_rent_and_own():
    keys = [chip.key for chip in CHIPS]
    assert len(set(keys)) == len(keys)
    assert {chip.key for chip in CHIPS if chip.gpu} == {"a100", "h100", "h200"}
    rented = {"b200", "b300", "gb200", "gb300", "gh200", "mi300x", "l40s", "a10"}
    assert {chip.key for chip in PLANNED} == rented | {"rtx4090", "rtx5090", "v5e", "v5p", "v6e"}


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.key)
def test_every_chip_has_numbers_that_go_together_and_a_source(chip):
    assert len(chip.source) > 60
    assert 0 < chip.f32_flops <= chip.bf16_flops
    assert 100 < chip.bf16_flops / chip.bandwidth < 600  # FLOP a byte: a number of another unit would be far off
    assert 10e9 <= chip.memory <= chip.visible_memory < 1.08 * chip.memory
    assert chip.nvlink < chip.bandwidth
    assert chip.network is None or chip.network < chip.nvlink
    assert (chip.network is None) == (chip.domain is None)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B300", "b300"), ("NVIDIA GB300", "gb300"), ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA L40", None), ("NVIDIA A10", "a10"), ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"), ("NVIDIA RTX 6000 Ada Generation", None),
        ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"),
        ("TPU v4", None), ("cpu", None), ("", None),
    ],
)  # fmt: skip
def test_a_device_is_the_chip_it_is_and_no_other(kind, key):
    chip = find_chip(kind)
    assert (chip and chip.key) == key


@pytest.mark.parametrize("chip", PLANNED, ids=lambda chip: chip.key)
def test_a_chip_that_is_only_planned_for_is_no_target_to_compile_for(chip):
    for call in (
        lambda: parse_target(f"{chip.key}:1x8"),
        lambda: parse_target(chip.key, devices=8),
        lambda: jp.target_devices(f"{chip.key}:1x8"),
        lambda: jp.target_devices(Target(chip, 1, 8)),
        lambda: description(chip),
    ):
        with pytest.raises(JaxparError, match=f"(?s){chip.name} is a chip to plan for.*are h200, h100, a100") as caught:
            call()
        assert len(caught.value.problems) == 1


@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_no_time_is_given_over_machines_whose_network_is_their_own(monkeypatch):
    """A chip such as the GH200: what joins several machines is not the chip's."""
    chip = dataclasses.replace(parse_target("h100:1x1").chip, network=None, domain=None)
    monkeypatch.setattr("jaxpar.inspector.report.find_chip", lambda kind: chip)

    def inspected(target):
        mesh = Mesh(np.array(jp.target_devices(target)), ("data",), axis_types=(AxisType.Auto,))
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        return jp.inspect(jax.jit(lambda x: x.sum()), x)

    apart, together = inspected("h100:2x1"), inspected("h100:1x2")
    assert (apart.timeline, apart.chip) == (None, chip)
    assert any("the network between machines with NVIDIA H100 SXM is not in" in note for note in apart.notes)
    assert together.timeline is not None


def test_what_a_compiler_is_told_of_a_chip_is_in_the_table():
    told = description(parse_target("h100:1x8").chip)
    for line in ("core_count: 132", "device_memory_size: 84942979072", "l2_cache_size: 52428800", "active_links: 18",
                 "clock_rate_ghz: 1.98", "memory_bandwidth: 3350000000000", "major: 9 minor: 0"):  # fmt: skip
        assert line in told


def written(folder, **changed):
    """A file with the chip above, but for what is changed; None leaves a key out."""
    lines = {key: text for key, text in (MINE | changed).items() if text is not None}
    file = folder / "Acme.toml"
    file.write_text("[chip]\n" + "\n".join(f"{key} = {text}" for key, text in lines.items()))
    return file


def test_a_chip_of_the_users_own_is_read(tmp_path):
    chip = load_chip(written(tmp_path))
    assert (chip.key, chip.name, chip.memory, chip.visible_memory) == ("acme", "Acme One", 64 * 2**30, 64 * 2**30)
    assert (chip.bf16_flops, chip.nvlink, chip.network, chip.domain, chip.gpu) == (400e12, 100e9, 12.5e9, 8, None)
    assert find_chip("Acme One") is None
    alone = load_chip(written(tmp_path, network=None, domain=None, memory="24e9", bandwidth="2_000_000_000_000"))
    assert (alone.network, alone.domain, alone.memory, alone.bandwidth) == (None, None, 24 * 10**9, 2e12)


def test_the_example_of_the_documentation_is_a_chip(tmp_path):
    from jaxpar.mesh import chip_file

    text = (chip_file.__doc__ or "").partition("\n\n")[2]
    (tmp_path / "acme.toml").write_text("\n".join(line.strip() for line in text.splitlines()))
    assert load_chip(str(tmp_path / "acme.toml")) == load_chip(written(tmp_path, source='"measured on acme-3"'))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bandwidth": "0"}, ["chip.bandwidth = 0 in", "1e+06 to 1e+17", "bandwidth = 2e12"]),
        ({"nvlink": "-1.0"}, ["chip.nvlink = -1.0", "bytes per second"]),
        ({"nvlink": "0", "pcie": None}, ["chip.nvlink = 0 without chip.pcie", "pcie = 32e9"]),
        ({"network": "0"}, ["chip.network = 0"]),
        ({"bandwidth": "-2e12"}, ["chip.bandwidth = -2"]),
        ({"bf16_flops": "400"}, ["chip.bf16_flops = 400 in", "FLOP per second", "400e12"]),
        ({"bf16_flops": "inf"}, ["chip.bf16_flops = inf"]),
        ({"bf16_flops": "nan"}, ["chip.bf16_flops = nan"]),
        ({"bf16_flops": "true"}, ["chip.bf16_flops = True"]),
        ({"bf16_flops": '"400 TFLOPS"'}, ["'400 TFLOPS'", "400e12"]),
        ({"memory": '"64 gigs"'}, ["'64 gigs' is no size", "64 MiB"]),
        ({"memory": "80"}, ["chip.memory = 80 in", "64 GiB"]),
        ({"memory": "nan"}, ["chip.memory = nan in"]),
        ({"memory": "[1]"}, ["chip.memory = [1] in"]),
        ({"domain": "0"}, ["chip.domain = 0", "1 to 65,536"]),
        ({"domain": "8.0"}, ["chip.domain = 8.0"]),
        ({"name": "7"}, ["chip.name = 7"]),
        ({"source": '" "'}, ["chip.source = ' '"]),
        ({"bandwith": "1e12"}, ["chip.bandwith in", "did you mean 'bandwidth'"]),
        ({"source": None}, ["no chip.source in", 'source = "measured on acme-3"']),
        ({"bf16_flops": None}, ["no chip.bf16_flops in", "bf16_flops = 400e12"]),
    ],
)
def test_what_is_wrong_in_a_chip_is_one_clear_problem(tmp_path, changed, words):
    with pytest.raises(JaxparError) as caught:
        load_chip(written(tmp_path, **changed))
    assert len(caught.value.problems) == 1
    assert all(word in str(caught.value) for word in [*words, "Acme.toml"]), caught.value


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(JaxparError) as caught:
        load_chip(written(tmp_path, bandwidth="0", nvlink=None, bandwith="2e12"))
    assert [problem.got.split(" in ")[0] for problem in caught.value.problems] == [
        "chip.bandwith", "chip.bandwidth = 0", "no chip.nvlink",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chip = ", ["is no TOML", "[chip] with name"]),
        ("\x80", ["is no TOML"]),
        ("", ["no table [chip]"]),
        ("chip = 8", ["no table [chip]"]),
        ("[chips]\nname = 'x'", ["chips outside of [chip]"]),
        ("name = 'x'\n[chip]", ["name outside of [chip]"]),
    ],
)
def test_what_is_no_file_of_a_chip_is_refused(tmp_path, text, words):
    (tmp_path / "acme.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(JaxparError) as caught:
        load_chip(tmp_path / "acme.toml")
    assert len(caught.value.problems) == 1
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(JaxparError, match="a chip is a TOML file"):
            load_chip(path)
    assert set(KEYS) == set(MINE)


@pytest.mark.parametrize("name", ["a100-40gb", "h20", "v100", "a6000", "b100"])
def test_a_chip_that_the_table_lacks_is_not_taken_for_another(name, capsys):
    for words in (["plan", JOB, "--devices", "8", "--chip", name], ["check", JOB, f"mesh.target={name}:1x8"]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "did you mean" not in said
        assert "a100 (80 GB), " in said


@pytest.mark.parametrize("name", ["H100", "NVIDIA H100", "h-100"])
def test_a_chip_in_another_spelling_is(name, capsys):
    assert main(["plan", JOB, "--devices", "8", "--chip", name]) == 1
    assert "did you mean 'h100'?" in capsys.readouterr().err
