"""Checks of versions that work together, and of variables that change how JAX works."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpar.errors import JaxparError
from jaxpar.job.doctor.finding import Finding
from jaxpar.mesh.memory_pool import NAME, OFF, OLD, OWN, PREALLOCATE, SHARE, taken
from jaxpar.mesh.target import find_plugin

CHECKED = ("jax", "flax", "optax", "orbax-checkpoint")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
ROOMY = 0.95  # share of a GPU's memory above which little is left beside JAX's pool
DRIVER = Path("/proc/driver/nvidia/version")


def installed(name: str) -> str:
    """Returns the version of a package, "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def asked(package: str) -> dict[str, str]:
    """Returns the versions that an installed package asks of others, as `>=1.2,<2`; `python` is one of them."""
    try:
        data = importlib.metadata.metadata(package).json
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {"python": str(data.get("requires_python", ""))}
    for line in data.get("requires_dist", []):
        match = re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(;.*)?$", line)
        if match and not match[3]:
            found[match[1].lower()] = match[2].replace(" ", "")
    return found


def within(version: str, wanted: str) -> bool:
    """Returns whether a version is within bounds such as `>=1.2,<2`; of a release candidate, its release counts.

    >>> within("0.12.0", ">=0.10.2,<0.13"), within("0.13.0", ">=0.10.2,<0.13")
    (True, False)
    """
    holds = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    for bound in filter(None, wanted.split(",")):
        match = re.match(r"(>=|<=|==|!=|>|<)([\d.]+)", bound)
        if match and not holds[match[1]](*_aligned(version, match[2])):
            return False
    return True


def _aligned(first: str, second: str) -> tuple[list[int], list[int]]:
    """Returns both versions as numbers, as many of each."""
    a, b = ([int(n) for n in re.findall(r"\d+", re.match(r"[\d.]*", text)[0])] for text in (first, second))  # pyright: ignore
    length = max(len(a), len(b))
    return a + [0] * (length - len(a)), b + [0] * (length - len(b))


def versions() -> Finding:
    """Compares Python and the packages that jaxpar stands on with what it was tested with."""
    wanted = asked("jaxpar")
    have = {"python": platform.python_version()} | {name: installed(name) for name in (*CHECKED, "jaxlib")}
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in have.items())
    if not wanted:
        return Finding("versions", "warning", f"{shown}; jaxpar itself is not installed, so what it needs is not known",
            "pip install -e . where jaxpar lies")  # fmt: skip
    wanted |= {"jaxlib": asked("jax").get("jaxlib", "")}
    wrong = [name for name, version in have.items() if not version or not within(version, wanted.get(name, ""))]
    if not wrong:
        return Finding("versions", "ok", shown)
    lines = ", ".join(f"{name} {have[name] or 'missing'}, not {wanted.get(name, '')}" for name in wrong)
    fix = " ".join(f"'{name}{wanted.get(name, '')}'" for name in wrong if name != "python")
    ways = [f"pip install {fix}"] * bool(fix) + [f"a Python {wanted['python']}"] * ("python" in wrong)
    return Finding("versions", "problem", lines, " and ".join(ways))


def plugin(driver: Path = DRIVER) -> Finding:
    """Compares JAX's plugin for NVIDIA GPUs with jaxlib, of whose version it must be."""
    library = installed("jaxlib")
    found = {name: version for name in PLUGINS if (version := installed(name))}
    compiler = installed("jax-cuda13-pjrt")
    wrong = [f"{name} {version}" for name, version in found.items() if version != library]
    wrong += [f"jax-cuda13-pjrt {compiler}"] if compiler and compiler.split(".")[:2] != library.split(".")[:2] else []
    if wrong:
        return Finding("cuda", "problem", f"{', '.join(wrong)} beside jaxlib {library}",
            f"pip install 'jax[cuda13]=={installed('jax')}'")  # fmt: skip
    if found:
        return Finding("cuda", "ok", f"{', '.join(f'{name} {version}' for name, version in found.items())}, as jaxlib")
    if driver.exists():
        return Finding("cuda", "warning", "an NVIDIA driver and no plugin of JAX: its GPUs are not seen",
            "pip install 'jaxpar[cuda]'")  # fmt: skip
    return Finding("cuda", "ok", "no NVIDIA driver" + (", XLA's compiler for its GPUs is there" if compiler else ""))


def toolkit(driver: Path = DRIVER) -> Finding:
    """Says what XLA ends its work with where a program is compiled for GPUs that are not there."""
    if why := find_plugin():
        return Finding("inspections", "ok", f"none for absent GPUs: {why}", "pip install 'jaxpar[gpu-plan]'")
    if driver.exists() and any(map(installed, PLUGINS)):
        return Finding("inspections", "ok", "compiled with the CUDA toolkit that XLA finds, as programs that run are")
    return Finding("inspections", "ok", "compiled with a stand-in for the CUDA toolkit, whatever toolkit is installed")


def variables(environment: Mapping[str, str], *, simulate: int) -> Iterator[Finding]:
    """Looks at the variables that change where and how JAX runs; flags of XLA are tried out where devices are.

    Args:
      environment: Such as `os.environ`.
      simulate: Devices that the job simulates, 0 for real ones.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not simulate and "cpu" in platforms.split(",")[:1]:
        yield Finding("JAX_PLATFORMS", "warning", f"{platforms!r} hides every accelerator", "unset JAX_PLATFORMS, or "
            "mesh.simulate in the job where that is meant")  # fmt: skip
    elif platforms:
        yield Finding("JAX_PLATFORMS", "ok", f"{platforms!r}" + ", which mesh.simulate overrides" * bool(simulate))
    count = environment.get("JAX_NUM_CPU_DEVICES", "")
    if count and count != str(simulate):
        yield Finding("CPU devices", "warning", f"JAX_NUM_CPU_DEVICES={count}, mesh.simulate = {simulate}: the job's "
            "number counts", "unset JAX_NUM_CPU_DEVICES")  # fmt: skip
    yield from _pool(environment)
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        yield Finding("GPU memory", "warning", "XLA_PYTHON_CLIENT_ALLOCATOR=platform: every array is a call of the "
            "driver, which is slow", "unset it")  # fmt: skip
    if environment.get("JAX_DISABLE_JIT", "").lower() in ("1", "true", "yes", "on"):
        yield Finding("JAX_DISABLE_JIT", "problem", "nothing is compiled", "unset JAX_DISABLE_JIT")


def _pool(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Looks at the variables that say how much of a GPU's memory JAX takes, by their new name and by their old one."""
    said = {name: environment[name] for name in (NAME, OLD) if environment.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in said.items())
    try:
        pool = taken(environment)
    except JaxparError as error:
        yield from (Finding("GPU memory", "problem", each.got, each.fix) for each in error.problems)
        return
    if said and pool.part > ROOMY:
        text = f"{shown}: {1 - pool.part:.0%} of a GPU are left for its driver and NCCL"
        yield Finding("GPU memory", "warning", text, f"unset it: jaxpar takes {SHARE}")
    elif said and pool.part < OWN:
        text = f"{shown}: a run has {pool.part:.0%} of a GPU"
        yield Finding("GPU memory", "warning", text, f"unset it, unless others share the GPU: jaxpar takes {SHARE}")
    elif said:
        yield Finding("GPU memory", "ok", shown + f", the deprecated name of {NAME}" * (OLD in said))
    if environment.get(PREALLOCATE) in OFF:
        text = f"{PREALLOCATE}={environment[PREALLOCATE]}: memory comes piece by piece, and in pieces it may run out"
        yield Finding("GPU memory", "warning", text, "unset it, unless others share the GPU")
