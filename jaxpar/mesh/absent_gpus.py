"""Absent GPUs as JAX devices: programs can be compiled for them, but they hold no arrays.

The only module that uses JAX's experimental topologies.
"""

from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.mesh.devices import use_cpu_only
from jaxpar.mesh.target import Target, description, missing_plugin, parse_target
from jaxpar.mesh.xla import hush_plugin

SIMULATED = "--target cpu, in Python jp.simulate(8), which need none"
_DESCRIBED: dict[Any, str] = {}


def target_devices(target: str | Target) -> list[Any]:
    """Returns absent GPUs for a mesh or a layout: programs can be compiled for them, but they hold no arrays.

    Args:
      target: `CHIP:NODESxGPUS`, such as `h100:16x8`.

    Raises:
      JaxparError: If there is no such target, or the plugin is missing or does not fit the installed jax.
    """
    return list(absent_devices(target if isinstance(target, Target) else parse_target(str(target))))


@cache
def absent_devices(target: Target) -> tuple[Any, ...]:
    """Returns the absent devices of a target, node by node.

    Raises:
      JaxparError: If the chip is for the planner only, or the plugin is missing or does not fit the installed jax.
    """
    from jax.experimental import topologies

    target_config = description(target.chip)
    if why_not := missing_plugin():
        raise refuse(
            f"target {target}: {why_not}",
            rule="compiling for absent GPUs needs XLA's GPU compiler",
            fix=f"pip install jax-cuda13-pjrt=={version('jaxlib')} (extra gpu-plan), or {SIMULATED}",
        )
    hush_plugin()
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms is None:  # else the plugin looks for CUDA's libraries, which compiling does not need
        use_cpu_only()
    try:
        topology_desc = topologies.get_topology_desc(
            platform="cuda", target_config=target_config, topology=f"1x{target.nodes}x{target.per_node}"
        )
    except NotImplementedError as error:  # the plugin was refused when the backend of processors was started
        raise refuse(
            f"target {target} after a JAX array or jax.devices() on a machine without GPUs",
            rule="the compiler for absent GPUs is loaded before JAX starts its first backend",
            fix=f'jp.target_devices("{target}") as the first call, before jnp.zeros, jax.random.key and the like; or '
            "JAX_PLATFORMS=cpu in the environment",
        ) from error
    except (RuntimeError, ValueError) as error:
        raise refuse(
            f"target {target}: {str(error).splitlines()[0]}",
            rule="jax-cuda13-pjrt has the same version as jaxlib",
            fix=f"pip install jax-cuda13-pjrt=={version('jaxlib')}, or {SIMULATED}",
        ) from error
    _DESCRIBED.update(dict.fromkeys(topology_desc.devices, target_config))
    return tuple(topology_desc.devices)


def find_target_config(device: object) -> str | None:
    """Returns the target description that XLA got for an absent GPU; None for a real device."""
    return _DESCRIBED.get(device)


# Stand-ins for NVIDIA's CUDA toolkit, for programs that are compiled and never run. XLA's GPU compiler ends with two
# tools of that toolkit: a library of mathematical functions, which it links into every kernel, and the assembler
# `ptxas`, which it starts for every kernel. By then the program is optimized and its buffers are assigned, and without
# a GPU nothing more is needed. An empty library and an assembler that writes an empty program save the toolkit and its
# time.

RELEASE = "13.0"  # of CUDA, as the descriptions of GPUs in `target.py` say
ASSEMBLER = f"""\
#!/bin/sh
case "$*" in *--version*)
  echo "ptxas: NVIDIA (R) Ptx optimizing assembler"
  echo "Cuda compilation tools, release {RELEASE}, V{RELEASE}.0"
  exit ;;
esac
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then printf '\\177ELF' > "$2"; fi
  shift
done
"""
LIBRARY = "; no functions\n"


def make_toolkit(folder: Path) -> Path:
    """Writes the stand-ins below a folder; returns the value of XLA's option `xla_gpu_cuda_data_dir`."""
    toolkit = folder / "cuda"
    assembler, library = toolkit / "bin" / "ptxas", toolkit / "nvvm" / "libdevice" / "libdevice.10.bc"
    for file, text in ((assembler, ASSEMBLER), (library, LIBRARY)):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assembler.chmod(0o755)
    return toolkit
