"""A step is compiled for inspection once: what XLA made of it is read from then on, or the file is said to be bad."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.inspector import compiled
from jaxpar.mesh.chips import find_chip
from jaxpar.mesh.target import Target, missing_plugin

SETTINGS = jp.DecoderConfig(vocab=64, seq=16, layers=1, dim=16, heads=2)
BATCH = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
FACTS = ("memory", "total", "ledger", "flop", "flags", "seconds")


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """An empty folder for what is kept, and the platform of each program that was compiled since."""
    made = []

    def counted(lowered, platform, options, make=compiled._compile_and_read):
        made.append(platform)
        return make(lowered, platform, options)

    monkeypatch.setattr(compiled, "_compile_and_read", counted)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield made
    jax.config.update("jax_compilation_cache_dir", before)


def step_of(devices=None):
    layout = jp.compose(partial(jp.Decoder, SETTINGS), jp.Parallel(fsdp=-1), devices)
    return jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1))


def inspected(times, devices=None):
    """Returns the reports of so many inspections, from one line: where a program is made is part of it."""
    return [jp.inspect(step_of(devices), BATCH) for _ in range(times)]


def facts(report):
    return {name: getattr(report, name) for name in FACTS}


@pytest.mark.nightly
@pytest.mark.parametrize("target", [None, pytest.param("h100:1x2", marks=pytest.mark.full)])
def test_a_second_inspection_compiles_nothing_and_finds_the_same(target, compiles):
    if target and (missing := missing_plugin()):
        pytest.skip(f"compiling for absent GPUs: {missing}")
    devices = jp.target_devices(target) if target else jax.devices()[:2]
    first, second = inspected(2, devices)
    assert compiles == ["gpu" if target else "cpu"]
    assert facts(second) == facts(first)


@pytest.mark.nightly
def test_another_program_device_option_setting_flag_or_version_has_another_file(compiles, monkeypatch):
    devices = jax.devices()[:2]
    step = step_of(devices)
    lowered = step.lower(step.abstract(), BATCH)

    def file(lowered=lowered, devices=devices, options=None):
        return compiled.cache_file(lowered, devices, options or {})

    longer = {name: jax.ShapeDtypeStruct((16, 16), jnp.int32) for name in BATCH}
    found = [
        file(),
        file(step.lower(step.abstract(), longer)),
        file(devices=devices[::-1]),
        file(options={"xla_cpu_enable_fast_math": False}),
    ]
    with jax.default_matmul_precision("float32"):
        found.append(file())
    for change in (
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false"),
        lambda patch: patch.setattr(compiled, "_version", lambda name: "another"),
        lambda patch: patch.setattr(compiled, "CACHE_FORM", -1),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            found.append(file())
    assert len(set(found)) == len(found) == 8
    assert file() == found[0]


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_a_chip_of_the_same_name_with_less_memory_is_another(compiles):
    chip, found = find_chip("h100"), set()
    for reported in (chip.reported_memory, chip.visible_memory // 2):
        devices = jp.target_devices(Target(replace(chip, reported_memory=reported), 1, 2))
        step = step_of(devices)
        found.add(compiled.cache_file(step.lower(step.abstract(), BATCH), devices, {}))
    assert len(found) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: data[:-1] + b"?"])
def test_a_damaged_file_is_said_and_not_read(damage, tmp_path):
    file, fields = tmp_path / "inspected" / "key", {"text": "HloModule", "said": ["a line"]}
    compiled.write_cached(file, fields)
    assert compiled.read_cached(file) == fields
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match=f"{file} is damaged; the program is compiled again"):
        assert compiled.read_cached(file) is None


@pytest.mark.nightly
def test_a_folder_that_cannot_be_written_is_said_and_the_report_is_made(compiles, tmp_path):
    (tmp_path / "inspected").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match=f"{tmp_path}/inspected.*; the program is (compiled again|not cached)"):
        (report,) = inspected(1)
    assert report.total > 0


@pytest.mark.parametrize("folder", [None, "", "gs://bucket/cache"])
def test_without_a_folder_of_this_machine_nothing_is_kept(folder, compiles):
    jax.config.update("jax_compilation_cache_dir", folder)
    assert compiled.cache_file(None, (), {}) is None


def test_a_function_of_the_users_is_compiled_each_time(compiles):
    """It may be jitted with compiler options, which its StableHLO does not say."""
    for flag in (True, False):
        jp.inspect(jax.jit(lambda x: x @ x, compiler_options={"xla_cpu_enable_fast_math": flag}), jnp.ones((4, 4)))
    assert len(compiles) == 2
