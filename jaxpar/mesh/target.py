"""Targets, real or absent GPUs to compile for: parses their names, and describes them to XLA's compiler.

    "h100:16x8" ─► Target ─► 128 devices to compile for, which hold no arrays (`absent_gpus.py`)

Imports no JAX. The description is the text of XLA's `GpuTargetConfigProto` (openxla/xla,
xla/stream_executor/device_description.proto).
"""

import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from jaxpar.errors import JaxparError, refuse
from jaxpar.mesh.chips import CHIPS, Chip, suggest_chip
from jaxpar.mesh.xla import PLUGIN

FORM = "a target is CHIP:NODESxGPUS, or cpu"
MOST = 65_536


@dataclass(frozen=True, slots=True)
class Target:
    """GPUs to compile for.

    Attributes:
      chip: The kind of GPU.
      nodes: Number of machines.
      per_node: GPUs per machine, joined by NVLink.
    """

    chip: Chip
    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.chip.key}:{self.nodes}x{self.per_node}"


def parse_target(text: str, *, devices: int | None = None) -> Target:
    """Parses a target such as `h100:16x8`.

    Args:
      text: `CHIP:NODESxGPUS`; `CHIP` alone stands for as many nodes of eight as `devices` fill.
      devices: Number of devices of the job.

    Raises:
      JaxparError: If there is no such chip, or the counts are invalid.

    >>> parse_target("h200:1x8").devices
    8
    """
    chips = {chip.key: chip for chip in CHIPS if chip.gpu}
    name, colon, counts = text.strip().lower().partition(":")
    if uncompiled := next((chip for chip in CHIPS if chip.key == name and not chip.gpu), None):
        raise _uncompiled(f"target {text!r}", uncompiled)
    if name not in chips:
        fix = "--target cpu, without counts; in Python jp.simulate(8)" if name == "cpu" else suggest_chip(name, chips)
        raise refuse(f"target {text!r}", rule=f"{FORM}; chips are {', '.join(chips)}", fix=fix)
    if not colon and devices:
        per_node = min(devices, 8)
        counts = f"{-(-devices // per_node)}x{per_node}"
    match = re.fullmatch(r"(\d{1,6})x(\d{1,4})", counts)
    if not match or not 1 <= int(match[1]) * int(match[2]) <= MOST:
        raise refuse(f"target {text!r}", rule=f"{FORM}; 1 to {MOST:,} GPUs", fix=f"{name}:16x8 for 16 nodes of 8 GPUs")
    return Target(chips[name], int(match[1]), int(match[2]))


def missing_plugin() -> str | None:
    """Returns the reason that this machine cannot compile for absent GPUs, or None if it can."""
    try:
        spec = find_spec(PLUGIN)
    except ModuleNotFoundError:
        spec = None
    if not spec:
        return "the plugin jax-cuda13-pjrt is not installed"
    plugin, jaxlib = (version(name) for name in ("jax-cuda13-pjrt", "jaxlib"))
    if plugin.split(".")[:2] != jaxlib.split(".")[:2]:
        return f"jax-cuda13-pjrt {plugin} is not of the version of jaxlib {jaxlib}"
    return None


def description(chip: Chip) -> str:
    """Returns the description of a chip for XLA's compiler: the text of a `GpuTargetConfigProto`.

    Raises:
      JaxparError: If the chip is for the planner only.
    """
    gpu = chip.gpu
    if gpu is None:
        raise _uncompiled(f"target {chip.key!r}", chip)
    major, minor = gpu.capability
    feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock / 1e9:.3g}
  device_memory_size: {chip.visible_memory}
  shared_memory_per_block_optin: {gpu.shared_memory - 1024}
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  name: "{chip.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{chip.name}"
"""


def _uncompiled(target: str, chip: Chip) -> JaxparError:
    supported = ", ".join(chip.key for chip in CHIPS if chip.gpu)
    return refuse(
        f"{target}: {chip.name} is a chip to plan for, without a description for XLA's compiler",
        rule=f"{FORM}; chips to compile for are {supported}",
        fix="h100:1x8",
    )
