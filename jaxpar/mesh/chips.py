"""Chips and what they can do at most, each number with the sheet it comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One accelerator.

    Attributes:
      name: What the vendor calls it.
      matches: A part of `jax.Device.device_kind` that tells it apart, lower case.
      bf16_flops: Dense bfloat16 FLOP per second, without sparsity.
      memory: Bytes of device memory.
      source: Where the numbers come from.
    """

    name: str
    matches: str
    bf16_flops: float
    memory: int
    source: str


CHIPS = (
    Chip(
        name="H200 SXM", matches="h200", bf16_flops=989.5e12, memory=141 * 10**9,
        source="NVIDIA H200 datasheet: 1,979 TFLOPS bf16 with sparsity, half without; 141 GB",
    ),
    Chip(
        name="H100 SXM", matches="h100", bf16_flops=989.5e12, memory=80 * 10**9,
        source="NVIDIA H100 datasheet, SXM column: 1,979 TFLOPS bf16 with sparsity, half without; 80 GB",
    ),
    Chip(
        name="A100", matches="a100", bf16_flops=312e12, memory=80 * 10**9,
        source="NVIDIA A100 datasheet: 312 TFLOPS bf16 without sparsity; 80 GB",
    ),
)  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip that JAX calls `device_kind`, or None if the table has no such chip."""
    return next((chip for chip in CHIPS if chip.matches in device_kind.lower()), None)
