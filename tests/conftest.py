"""Eight simulated devices, and compiled programs kept between runs."""

import ctypes.util
import functools
import gc
import itertools
import os
import re
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxpar-tests-cache"))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # the time goes into compiling tiny programs
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes start; each would compile all modules anew
if version("jaxlib") < "0.11":  # has two emitters of kernels for processors; the older one compiles in half the time
    older = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {older}".strip()
if "PYTEST_XDIST_WORKER" not in os.environ and (allocator := ctypes.util.find_library("jemalloc")):
    os.environ.setdefault("LD_PRELOAD", allocator)  # of the workers: XLA compiles in a seventh less time than on libc

import jax
import pytest
from browser import CHROMIUM, Browser
from hypothesis import settings

import jaxpar as jp

jp.simulate(8)
settings.register_profile("shared", deadline=None)  # what a busy machine takes says nothing of a property
settings.load_profile("shared")
sys.dont_write_bytecode = False  # nor is each file of tests rewritten by each worker
# a worker holds many objects that stay; looked through less often, eight pipelined models take 31.5 s of CPU for 33
gc.set_threshold(20_000, 20, 100)
# Linux gives a process 65,530 mappings; programs on processors take dozens each, and XLA crashes without
MAPPINGS, MORE, EVERY = 20_000, 15_000, 20
allowed, tests = MAPPINGS, itertools.count(1)

collect_ignore = ["gpu"]  # those tests want real devices, and have a pytest.ini and a conftest of their own


def pytest_configure(config):
    """Refuses to look for GPUs here, where every device is simulated: such a run would pass and have seen none."""
    if re.search(r"\bgpu\b", config.option.markexpr):
        raise pytest.UsageError("tests on GPUs are run by `pytest tests/gpu`")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not choose
def pytest_collection_modifyitems(items):
    """Thins out grids, and puts files with slow tests first: a long one that begins last leaves a worker idle."""
    thin_out(items)
    slow = {item.path for item in items if SLOW & {mark.name for mark in item.iter_markers()}}
    items.sort(key=lambda item: item.path not in slow)


SLOW = {"slow", "nightly"}


def thin_out(items):
    """Marks slow and nightly cases of a grid as full, but for two, or an eighth of a large grid, that lie evenly in it.

    `spread(n)` says how many slow cases CI runs: more, or fewer, of which the others are nightly.
    """
    grids = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if SLOW & marks and "full" not in marks:
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        usual, spread = max(2, len(cases) // 8), cases[0].get_closest_marker("spread")
        most = spread.args[0] if spread else usual
        chosen = spread_over(cases, max(usual, most))
        for item in cases:
            if item not in chosen:
                item.add_marker(pytest.mark.full)
        slow_cases = spread_over(chosen, most)
        for item in chosen:
            if item not in slow_cases:
                item.add_marker(pytest.mark.nightly)


def spread_over(cases, count):
    """Returns cases that lie evenly in a list, one further each time, so that all parameters of a grid change."""
    count = min(count, len(cases))
    stride = max(1, len(cases) // max(count, 1))
    return [cases[len(cases) * number // count + number % stride] for number in range(count)]


@pytest.fixture(autouse=True)
def forgotten_programs(request):
    """Forgets what was compiled, once it takes many of the mappings that a process may have."""
    global allowed
    yield
    if next(tests) % EVERY == 0 and mappings() > allowed:
        forget_cached(but=request.module)
        jax.clear_caches()
        gc.collect()
        allowed = max(MAPPINGS, mappings() + MORE)  # some are held: by a step that a test keeps, or by JAX


def forget_cached(but):
    """Empties the `functools.cache`s of all test files but one: the steps in them hold their programs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("test_") and module is not but:
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    with Browser() as started:
        yield started


def mappings():
    maps = Path("/proc/self/maps")
    return maps.read_text().count("\n") if maps.exists() else 0
