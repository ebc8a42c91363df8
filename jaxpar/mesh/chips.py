"""Chips and what they can do at most, each number with the sheet it comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One accelerator, in the machine its vendor sells it in.

    Attributes:
      key: What a target calls it.
      name: What the vendor calls it.
      matches: A part of `jax.Device.device_kind` that tells it apart, lower case.
      bf16_flops: Dense bfloat16 FLOP per second, without sparsity.
      f32_flops: FLOP per second of float32 matrix products as XLA runs them by default, in TF32.
      memory: Bytes of device memory on the sheet.
      visible: Bytes of device memory that the driver reports.
      bandwidth: Bytes per second of device memory.
      nvlink: Bytes per second one way, per GPU, to the GPUs of the same node.
      network: Bytes per second one way, per GPU, to other nodes.
      capability: CUDA compute capability.
      cores: Streaming multiprocessors.
      lanes: float32 units of one of them.
      shared_memory: Bytes of shared memory of one of them.
      cache: Bytes of L2 cache.
      clock: Highest clock, in Hz.
      links: NVLink links.
      source: Where the numbers come from.
    """

    key: str
    name: str
    matches: str
    bf16_flops: float
    f32_flops: float
    memory: int
    visible: int
    bandwidth: float
    nvlink: float
    network: float
    capability: tuple[int, int]
    cores: int
    lanes: int
    shared_memory: int
    cache: int
    clock: float
    links: int
    source: str


CHIPS = (
    Chip(
        key="h200", name="NVIDIA H200 SXM", matches="h200", bf16_flops=989.5e12, f32_flops=494.7e12,
        memory=141 * 10**9, visible=151_397_597_184, bandwidth=4.8e12, nvlink=450e9, network=50e9,
        capability=(9, 0), cores=132, lanes=128, shared_memory=233_472, cache=50 * 2**20, clock=1.98e9, links=18,
        source="NVIDIA H200 datasheet: 1,979 TFLOPS bf16 and 989 TF32 with sparsity, half without; 141 GB at 4.8 TB/s; "
        "NVLink 900 GB/s both ways; DGX H200 datasheet: 8 x 400 Gb/s; CUDA C++ programming guide",
    ),
    Chip(
        key="h100", name="NVIDIA H100 SXM", matches="h100", bf16_flops=989.5e12, f32_flops=494.7e12,
        memory=80 * 10**9, visible=84_942_979_072, bandwidth=3.35e12, nvlink=450e9, network=50e9,
        capability=(9, 0), cores=132, lanes=128, shared_memory=233_472, cache=50 * 2**20, clock=1.98e9, links=18,
        source="NVIDIA H100 datasheet, SXM: 1,979 TFLOPS bf16 and 989 TF32 with sparsity, half without; 80 GB at "
        "3.35 TB/s; NVLink 900 GB/s both ways; DGX H100 datasheet: 8 x 400 Gb/s; CUDA C++ programming guide",
    ),
    Chip(
        key="a100", name="NVIDIA A100 SXM 80GB", matches="a100", bf16_flops=312e12, f32_flops=156e12,
        memory=80 * 10**9, visible=85_198_045_184, bandwidth=2.039e12, nvlink=300e9, network=25e9,
        capability=(8, 0), cores=108, lanes=64, shared_memory=167_936, cache=40 * 2**20, clock=1.41e9, links=12,
        source="NVIDIA A100 datasheet, SXM 80GB: 312 TFLOPS bf16 and 156 TF32 without sparsity; 80 GB at 2,039 GB/s; "
        "NVLink 600 GB/s both ways; DGX A100 datasheet: 8 x 200 Gb/s; CUDA C++ programming guide",
    ),
)  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip that JAX calls `device_kind`, or None if the table has no such chip."""
    return next((chip for chip in CHIPS if chip.matches in device_kind.lower()), None)
