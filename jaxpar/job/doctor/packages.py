"""Checks of package versions, and of environment variables that change the behavior of JAX."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpar.errors import JaxparError
from jaxpar.job.doctor.this_machine import Finding
from jaxpar.mesh.memory_pool import NAME, OFF, OLD, OWN, PREALLOCATE, SHARE, pool_of_environment
from jaxpar.mesh.target import missing_plugin

PACKAGES = ("jax", "flax", "optax")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
ROOMY = 0.95  # share of a GPU's memory above which JAX's pool leaves too little for driver and NCCL
DRIVER = Path("/proc/driver/nvidia/version")


def installed(name: str) -> str:
    """Returns the version of a package, "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def requirements(package: str) -> dict[str, str]:
    """Returns the version requirements of an installed package, e.g. `>=1.2,<2`, by package name and for `python`."""
    try:
        data = importlib.metadata.metadata(package).json
    except importlib.metadata.PackageNotFoundError:
        return {}
    bounds = {"python": str(data.get("requires_python", ""))}
    for line in data.get("requires_dist", []):
        match = re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(;.*)?$", line)
        if match and not match[3]:
            bounds[match[1].lower()] = match[2].replace(" ", "")
    return bounds


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version satisfies bounds such as `>=1.2,<2`; a release candidate counts as its release.

    >>> satisfies("0.12.0", ">=0.10.2,<0.13"), satisfies("0.13.0", ">=0.10.2,<0.13")
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
        if match and not holds[match[1]](*_parse_versions(version, match[2])):
            return False
    return True


def _parse_versions(first: str, second: str) -> tuple[list[int], list[int]]:
    """Returns both versions as integer lists of equal length."""
    a, b = ([int(n) for n in re.findall(r"\d+", re.match(r"[\d.]*", text)[0])] for text in (first, second))  # pyright: ignore
    length = max(len(a), len(b))
    return a + [0] * (length - len(a)), b + [0] * (length - len(b))


def versions() -> Finding:
    """Compares Python and jaxpar's dependencies with the versions that jaxpar requires."""
    bounds = requirements("jaxpar")
    local = {"python": platform.python_version()} | {name: installed(name) for name in (*PACKAGES, "jaxlib")}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in local.items())
    if not bounds:
        return Finding("versions", "warning", f"{text}; jaxpar itself is not installed, so what it needs is not known",
            "pip install -e . in the folder of jaxpar's pyproject.toml")  # fmt: skip
    bounds |= {"jaxlib": requirements("jax").get("jaxlib", "")}
    misfits = [name for name, version in local.items() if not version or not satisfies(version, bounds.get(name, ""))]
    if not misfits:
        return Finding("versions", "ok", text)
    lines = ", ".join(f"{name} {local[name] or 'missing'}, not {bounds.get(name, '')}" for name in misfits)
    fix = " ".join(f"'{name}{bounds.get(name, '')}'" for name in misfits if name != "python")
    fixes = [f"pip install {fix}"] * bool(fix) + [f"a Python {bounds['python']}"] * ("python" in misfits)
    return Finding("versions", "problem", lines, " and ".join(fixes))


def plugin(driver: Path = DRIVER) -> Finding:
    """Checks that JAX's plugin for NVIDIA GPUs has the version of jaxlib."""
    library = installed("jaxlib")
    wheels = {name: version for name in PLUGINS if (version := installed(name))}
    compiler = installed("jax-cuda13-pjrt")
    misfits = [f"{name} {version}" for name, version in wheels.items() if version != library]
    misfits += [f"jax-cuda13-pjrt {compiler}"] if compiler and compiler.split(".")[:2] != library.split(".")[:2] else []
    if misfits:
        return Finding("cuda", "problem", f"{', '.join(misfits)} beside jaxlib {library}",
            f"pip install 'jax[cuda13]=={installed('jax')}'")  # fmt: skip
    if wheels:
        return Finding("cuda", "ok", f"{', '.join(f'{name} {version}' for name, version in wheels.items())}, as jaxlib")
    if driver.exists():
        return Finding("cuda", "warning", "an NVIDIA driver, but no JAX plugin: JAX does not see its GPUs",
            "pip install 'jaxpar[cuda]'")  # fmt: skip
    return Finding("cuda", "ok", "no NVIDIA driver" + (", XLA's compiler for its GPUs is there" if compiler else ""))


def toolkit(driver: Path = DRIVER) -> Finding:
    """Reports the CUDA toolkit, or stand-in, that XLA uses to compile for absent GPUs."""
    if reason := missing_plugin():
        return Finding("inspections", "ok", f"no programs for absent GPUs: {reason}", "pip install 'jaxpar[gpu-plan]'")
    if driver.exists() and any(map(installed, PLUGINS)):
        return Finding("inspections", "ok", "programs are compiled with the CUDA toolkit that XLA finds")
    return Finding(
        "inspections", "ok", "programs are compiled with a stand-in for the CUDA toolkit, even if one exists"
    )


def variables(environment: Mapping[str, str], *, simulate: int) -> Iterator[Finding]:
    """Checks the environment variables that affect JAX; the device probe tries XLA_FLAGS.

    Args:
      environment: Environment variables, such as `os.environ`.
      simulate: Number of simulated devices of the job, 0 for real ones.
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
        yield Finding("GPU memory", "warning", "XLA_PYTHON_CLIENT_ALLOCATOR=platform: every array is allocated by "
            "the driver, which is slow", "unset it")  # fmt: skip
    if environment.get("JAX_DISABLE_JIT", "").lower() in ("1", "true", "yes", "on"):
        yield Finding("JAX_DISABLE_JIT", "problem", "nothing is compiled", "unset JAX_DISABLE_JIT")


def _pool(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the variables for JAX's share of GPU memory, under their new and their old names."""
    settings = {name: environment[name] for name in (NAME, OLD) if environment.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    try:
        pool = pool_of_environment(environment)
    except JaxparError as error:
        yield from (Finding("GPU memory", "problem", problem.got, problem.fix) for problem in error.problems)
        return
    if settings and pool.share > ROOMY:
        text = f"{shown}: {1 - pool.share:.0%} of a GPU are left for its driver and NCCL"
        yield Finding("GPU memory", "warning", text, f"unset it: jaxpar takes {SHARE}")
    elif settings and pool.share < OWN:
        text = f"{shown}: a run has {pool.share:.0%} of a GPU"
        yield Finding("GPU memory", "warning", text, f"unset it, unless others share the GPU: jaxpar takes {SHARE}")
    elif settings:
        yield Finding("GPU memory", "ok", shown + f", the deprecated name of {NAME}" * (OLD in settings))
    if environment.get(PREALLOCATE) in OFF:
        text = f"{PREALLOCATE}={environment[PREALLOCATE]}: memory is allocated piece by piece, and fragments"
        yield Finding("GPU memory", "warning", text, "unset it, unless others share the GPU")
