"""Chips and their peak rates, with the data sheet that each number comes from.

    h200, h100, a100                        for the planner, and for compilation without the GPU
    b200, b300, gb200, gb300, gh200, mi300x for the planner
    l40s, a10, rtx4090, rtx5090             for the planner; their machines have no NVLink
    v5e, v5p, v6e

A number that no source states is None, never a guess: code that needs it asks the user.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.errors import check_ranges
from jaxpar.mesh.memory_pool import Pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The description of an NVIDIA GPU for XLA's compiler, without its memory.

    Attributes:
      capability: CUDA compute capability.
      cores: Streaming multiprocessors.
      lanes: float32 units per multiprocessor.
      shared_memory: Bytes of shared memory per multiprocessor.
      cache: Bytes of L2 cache.
      clock: Highest clock, in Hz.
      links: Number of NVLink links.
    """

    capability: tuple[int, int]
    cores: int
    lanes: int
    shared_memory: int
    cache: int
    clock: float
    links: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """An accelerator, and its links in the vendor's standard machine.

    Attributes:
      key: Its name in a target.
      name: The vendor's name.
      kind_pattern: Pattern found in the lower-case `jax.Device.device_kind`; "" matches no device.
      bf16_flops: Dense bfloat16 FLOP per second with float32 accumulation, without sparsity.
      f32_flops: FLOP per second of float32 matmuls as XLA runs them by default: in TF32, in bfloat16 on TPUs.
      memory: Bytes of device memory on the sheet.
      bandwidth: Bytes per second of device memory.
      nvlink: Bytes per second one way, per chip, to the chips of the same machine: over NVLink, else over PCIe, or over
        all links of a TPU's torus together, of which one torus axis has half (v5p: a third).
      network: Bytes per second one way, per chip, to other machines; None if it depends on the machine.
      pcie: Bytes per second one way, per chip, to the memory of its host; None if no source states it.
      domain: Number of chips that `nvlink` joins; None if it depends on the machine.
      reported_memory: Bytes of device memory that the driver reports; None if unknown.
      gpu: The description for XLA's compiler; None if only the planner uses the chip.
      source: The sources of the numbers.
    """

    key: str
    name: str
    kind_pattern: str
    bf16_flops: float
    f32_flops: float
    memory: int
    bandwidth: float
    nvlink: float
    network: float | None = None
    pcie: float | None = None
    domain: int | None = None
    reported_memory: int | None = None
    gpu: Gpu | None = None
    source: str

    @property
    def is_gpu(self) -> bool:
        """Whether the chip is a GPU, with or without a description for XLA's compiler."""
        return "TPU" not in self.name

    @property
    def visible_memory(self) -> int:
        """Bytes of device memory that the driver reports; if unknown, those of the data sheet, which are fewer."""
        return self.reported_memory or self.memory

    @property
    def usable_memory(self) -> int:
        """Bytes for a program's arrays in a run that preallocates jaxpar's default share."""
        return Pool().program_bytes(self.visible_memory)


_HOPPER = Gpu(
    capability=(9, 0), cores=132, lanes=128, shared_memory=233_472, cache=50 * 2**20, clock=1.98e9, links=18
)  # fmt: skip
_AMPERE = Gpu(
    capability=(8, 0), cores=108, lanes=64, shared_memory=167_936, cache=40 * 2**20, clock=1.41e9, links=12
)  # fmt: skip

CHIPS = (
    Chip(
        key="h200", name="NVIDIA H200 SXM", kind_pattern=r"\bh200\b", bf16_flops=989.5e12, f32_flops=494.7e12,
        memory=141 * 10**9, reported_memory=151_397_597_184, bandwidth=4.8e12, nvlink=450e9, network=50e9, domain=8,
        pcie=64e9, gpu=_HOPPER,
        source="NVIDIA H200 datasheet: 1,979 TFLOPS bf16 and 989 TF32 with sparsity, half without; 141 GB at 4.8 TB/s; "
        "NVLink 900 GB/s, PCIe 5.0 128 GB/s, both ways; DGX H200 datasheet: 8 x 400 Gb/s; CUDA C++ programming guide",
    ),
    Chip(
        key="h100", name="NVIDIA H100 SXM", kind_pattern=r"\bh100\b", bf16_flops=989.5e12, f32_flops=494.7e12,
        memory=80 * 10**9, reported_memory=84_942_979_072, bandwidth=3.35e12, nvlink=450e9, network=50e9, domain=8,
        pcie=64e9, gpu=_HOPPER,
        source="NVIDIA H100 datasheet, SXM: 1,979 TFLOPS bf16 and 989 TF32 with sparsity, half without; 80 GB at "
        "3.35 TB/s; NVLink 900 GB/s, PCIe 5.0 128 GB/s, both ways; DGX H100 datasheet: 8 x 400 Gb/s; CUDA C++ "
        "programming guide",
    ),
    Chip(
        key="a100", name="NVIDIA A100 SXM 80GB", kind_pattern=r"\ba100\b", bf16_flops=312e12, f32_flops=156e12,
        memory=80 * 10**9, reported_memory=85_198_045_184, bandwidth=2.039e12, nvlink=300e9, network=25e9, domain=8,
        pcie=32e9, gpu=_AMPERE,
        source="NVIDIA A100 datasheet, SXM 80GB: 312 TFLOPS bf16 and 156 TF32 without sparsity; 80 GB at 2,039 GB/s; "
        "NVLink 600 GB/s, PCIe 4.0 64 GB/s, both ways; DGX A100 datasheet: 8 x 200 Gb/s; CUDA C++ programming guide",
    ),
    Chip(
        key="b200", name="NVIDIA B200 SXM", kind_pattern=r"\bb200\b", bf16_flops=2250e12, f32_flops=1100e12,
        memory=180 * 10**9, reported_memory=191_514_411_008, bandwidth=8e12, nvlink=900e9, network=50e9, domain=8,
        source="NVIDIA Blackwell architecture technical brief, HGX B200: 4.5 PFLOPS bf16 and 2.2 TF32 with sparsity, "
        "half without; NVLink 1.8 TB/s both ways; DGX B200 datasheet: 1,440 GB at 64 TB/s for 8, 8 x 400 Gb/s; "
        "openxla/xla, target_config/specs/b200.txtpb: memory reported",
    ),
    Chip(
        key="b300", name="NVIDIA B300 SXM", kind_pattern=r"\bb300\b", bf16_flops=2250e12, f32_flops=1100e12,
        memory=288 * 10**9, reported_memory=297_021_865_984, bandwidth=8e12, nvlink=900e9, network=100e9, domain=8,
        source="NVIDIA HGX B300 datasheet: 36 PFLOPS bf16 and 18 TF32 with sparsity for 8, half without; NVLink 1.8 "
        "TB/s both ways; DGX B300 datasheet: 2.3 TB at 64 TB/s for 8, 8 x 800 Gb/s; openxla/xla, "
        "target_config/specs/b300.txtpb: memory reported",
    ),
    Chip(
        key="gb200", name="NVIDIA GB200 NVL72", kind_pattern=r"\bgb200\b", bf16_flops=2500e12, f32_flops=1250e12,
        memory=186 * 10**9, reported_memory=197_897_748_480, bandwidth=8e12, nvlink=900e9, network=50e9, domain=72,
        source="NVIDIA GB200 NVL72 datasheet: 360 PFLOPS bf16 and 180 TF32 with sparsity for 72, half without; "
        "13.4 TB at 576 TB/s and NVLink 130 TB/s both ways for 72; ConnectX-7, 400 Gb/s a GPU; openxla/xla, "
        "target_config/specs/gb200.txtpb: memory reported. Of boards of 4 (NVL4): --per-node 4",
    ),
    Chip(
        key="gb300", name="NVIDIA GB300 NVL72", kind_pattern=r"\bgb300\b", bf16_flops=2500e12, f32_flops=1250e12,
        memory=279 * 10**9, bandwidth=8e12, nvlink=900e9, network=100e9, domain=72,
        source="NVIDIA GB300 NVL72 datasheet: 360 PFLOPS bf16 and 180 TF32 with sparsity for 72, half without; 20 TB "
        "at 576 TB/s and NVLink 130 TB/s both ways for 72; ConnectX-8, 800 Gb/s a GPU",
    ),
    Chip(
        key="gh200", name="NVIDIA GH200 96GB", kind_pattern=r"\bgh200\b", bf16_flops=989.5e12, f32_flops=494.7e12,
        memory=96 * 10**9, bandwidth=4e12, nvlink=450e9,
        source="NVIDIA GH200 Grace Hopper Superchip datasheet, HBM3: 1,979 TFLOPS bf16 and 989 TF32 with sparsity, "
        "half without; 96 GB at 4 TB/s; NVLink 900 GB/s both ways. How many NVLink joins, and the network, are the "
        "machine's own",
    ),
    Chip(
        key="mi300x", name="AMD Instinct MI300X", kind_pattern=r"\bmi300x\b", bf16_flops=1307.4e12, f32_flops=653.7e12,
        memory=192 * 10**9, bandwidth=5.3e12, nvlink=448e9, network=50e9, domain=8, pcie=64e9,
        source="AMD Instinct MI300X data sheet: 1,307.4 TFLOPS bf16 and 653.7 TF32 without sparsity; 192 GB at "
        "5.3 TB/s; MI300X platform data sheet: 896 GB/s of Infinity Fabric both ways from each to the 7 others; 8 x "
        "400 Gb/s as in the servers that are sold; PCIe 5.0 x16 128 GB/s both ways",
    ),
    Chip(
        key="l40s", name="NVIDIA L40S", kind_pattern=r"\bl40s\b", bf16_flops=362.05e12, f32_flops=183e12,
        memory=48 * 10**9, bandwidth=864e9, nvlink=32e9, pcie=32e9,
        source="NVIDIA L40S datasheet: 362.05 TFLOPS bf16 and 183 TF32 without sparsity; 48 GB at 864 GB/s; no NVLink: "
        "PCIe 4.0 x16, 64 GB/s both ways",
    ),
    Chip(
        key="a10", name="NVIDIA A10", kind_pattern=r"\ba10\b", bf16_flops=125e12, f32_flops=62.5e12,
        memory=24 * 10**9, bandwidth=600e9, nvlink=32e9, pcie=32e9,
        source="NVIDIA A10 datasheet: 125 TFLOPS bf16 and 62.5 TF32 without sparsity; 24 GB at 600 GB/s; no NVLink: "
        "PCIe 4.0 x16, 64 GB/s both ways",
    ),
    Chip(
        key="rtx4090", name="NVIDIA GeForce RTX 4090", kind_pattern=r"\brtx 4090\b(?! laptop)", bf16_flops=165.2e12,
        f32_flops=82.6e12, memory=24 * 10**9, bandwidth=1.008e12, nvlink=31.5e9, pcie=31.5e9,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A: 165.2 TFLOPS bf16 that adds in float32 and 82.6 "
        "TF32 without sparsity; 24 GB at 1,008 GB/s; no NVLink: PCIe 4.0 x16, 31.5 GB/s (PCI-SIG)",
    ),
    Chip(
        key="rtx5090", name="NVIDIA GeForce RTX 5090", kind_pattern=r"\brtx 5090\b(?! laptop)", bf16_flops=209.5e12,
        f32_flops=104.8e12, memory=32 * 10**9, bandwidth=1.792e12, nvlink=63e9, pcie=63e9,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A: 209.5 TFLOPS bf16 that adds in float32 "
        "and 104.8 TF32 without sparsity; 32 GB at 1,792 GB/s; no NVLink: PCIe 5.0 x16, 63 GB/s (PCI-SIG)",
    ),
    Chip(
        key="v5e", name="Google TPU v5e", kind_pattern=r"^tpu v5( lite|e)", bf16_flops=197e12, f32_flops=197e12,
        memory=16 * 10**9, bandwidth=819e9, nvlink=200e9, network=3.125e9, domain=256,
        source="docs.cloud.google.com/tpu/docs/v5e: 197 TFLOPS bf16; 16 GB at 819 GB/s; interconnect 400 GB/s both "
        "ways, 2D torus of 256; data-center network 6.4 Tb/s for 256",
    ),
    Chip(
        key="v5p", name="Google TPU v5p", kind_pattern=r"^tpu v5p?$", bf16_flops=459e12, f32_flops=459e12,
        memory=95 * 10**9, bandwidth=2.765e12, nvlink=600e9, network=6.25e9, domain=8960,
        source="docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPS bf16; 95 GB at 2,765 GB/s; interconnect 1,200 GB/s both "
        "ways, 3D torus of 8,960, the largest job 6,144; data-center network 50 Gb/s a chip",
    ),
    Chip(
        key="v6e", name="Google TPU v6e", kind_pattern=r"^tpu v6( lite|e)", bf16_flops=918e12, f32_flops=918e12,
        memory=32 * 10**9, bandwidth=1.638e12, nvlink=400e9, network=12.5e9, domain=256,
        source="docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPS bf16; 32 GB at 1,638 GB/s; interconnect 800 GB/s both "
        "ways, 2D torus of 256; data-center network 25.6 Tb/s for 256",
    ),
)  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip with this `device_kind` in JAX, or None if the table has none.

    >>> find_chip("NVIDIA GH200 480GB").key, find_chip("TPU v5 lite").key, find_chip("NVIDIA A10G")
    ('gh200', 'v5e', None)
    """
    return next(
        (chip for chip in CHIPS if chip.kind_pattern and re.search(chip.kind_pattern, device_kind.lower())), None
    )


def suggest_chip(name: object, keys: Iterable[str]) -> str:
    """Returns the fix for a chip that the table lacks: its key if only the spelling differs, else all keys.

    A chip of a similar name is not proposed: an H20 is no H200, and the table's A100 has 80 GB.

    >>> suggest_chip("NVIDIA H100", ["a100", "h100"]), suggest_chip("a100-40gb", ["a100"])
    ("did you mean 'h100'?", 'one of: a100 (80 GB)')
    """
    keys = sorted(keys)
    bare = re.sub("[^a-z0-9]", "", str(name).lower()).removeprefix("nvidia").removeprefix("amd")
    sizes = {chip.key: round(chip.memory / 10**9) for chip in CHIPS}
    return f"did you mean {bare!r}?" if bare in keys else "one of: " + ", ".join(f"{k} ({sizes[k]} GB)" for k in keys)


# Links: the time of a message between two devices.


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link in the alpha-beta-gamma model: n bytes take `latency + n / bandwidth`.

    Attributes:
      latency: Seconds until the first byte arrives, alpha.
      bandwidth: Bytes per second one way, of one device, 1 / beta.
      combine: Seconds per byte to add two buffers, gamma; 0 if it overlaps with the transfer.

    Source: Thakur, Rabenseifner, Gropp (2005), section 3.
    """

    latency: float
    bandwidth: float
    combine: float = 0.0

    def __post_init__(self):
        check_ranges(self, "", {"latency": (0.0, 60.0), "bandwidth": (1.0, 1e18), "combine": (0.0, 1.0)})

    def time(self, size: float) -> float:
        """Returns the seconds of a message of `size` bytes.

        >>> Link(latency=5e-6, bandwidth=12e9).time(12e9)
        1.000005
        """
        return self.latency + size / self.bandwidth
