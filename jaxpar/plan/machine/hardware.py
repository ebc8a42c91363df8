"""Machines: chips in nodes, the share of their data sheets that they reach, and the links between them.

    time of a matmul       by its shape: `kernels.py`
    time of other ops      bytes / (device memory's bandwidth x streaming)
    slowest of n devices   1 + jitter x sqrt(2 ln n) times the mean

One set of constants holds for all runs on a family of chips; each constant has its source.

Constants are fitted to runs on A100 and H100. Other GPUs have the H100's shares of their own sheets, marked "assumed",
except MI300X, whose share of the peak is published. If a sheet does not state the chips of a machine, 8 are assumed; if
it does not state the network, a plan for several machines needs `between` (`known_machines`). A TPU's torus has no
nodes with NICs: it needs a file of measurements, `plan/machine/hardware_file.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpar.errors import check_ranges, refuse
from jaxpar.mesh.chips import CHIPS, Chip, Link
from jaxpar.plan.machine.kernels import Gemm
from jaxpar.plan.machine.option_texts import OptionText, flag_text

# a collective over both levels takes the slower level's time and this share of the faster one's: all-gathers of
# nccl-tests reach 324 GB/s on 4 x 8 H100s, the single levels 368 and 369
TOGETHER = 0.136
SMALLEST_KERNEL = 2e-6  # seconds of the smallest kernel: assumed, as in `jaxpar.inspector.timeline`


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Nodes of one kind of chip.

    Attributes:
      chip: The chip, with its peaks.
      per_node: Chips of a node.
      inside: Link of a chip to the others of its node, with the bandwidth that collectives reach.
      between: Link of a chip through its NIC to other nodes, with the bandwidth that collectives reach.
      gemm: Share of the peak in matmuls with weights.
      streaming: Share of the memory's bandwidth in elementwise ops.
      launch: Seconds of a kernel or a collective before its first byte.
      jitter: Standard deviation of step time between devices, relative to the step time.
      calibration: Factor on all seconds of a step, calibrated on runs: `jaxpar.plan.measurements.prediction_errors`.
      source: Source of the numbers for which `chip` and `gemm` do not name one.
    """

    chip: Chip
    per_node: int
    inside: Link
    between: Link
    gemm: Gemm
    streaming: float
    launch: float
    jitter: float = 0.0
    calibration: float = 1.0
    source: str

    def __post_init__(self):
        shares = {"streaming": (1e-3, 1.0), "jitter": (0.0, 1.0), "calibration": (1e-3, 1e3)}
        check_ranges(self, "hardware", {"per_node": (1, 2**31 - 1), "launch": (0.0, 1.0)} | shares)
        check_ranges(self.chip, "chip", {"bf16_flops": (1.0, 1e21), "bandwidth": (1.0, 1e18), "memory": (1, 2**60)})

    def matmuls(self, flop: np.ndarray | float, count: np.ndarray | float = 1) -> Any:
        """Returns the seconds of `count` matmuls of `flop` FLOP each."""
        return count * flop / (self.chip.bf16_flops * self.gemm.share(flop))

    def matmul(self, m: np.ndarray | float, k: np.ndarray | float, n: np.ndarray | float) -> Any:
        """Returns the seconds of a matmul [m, k] x [k, n], by its tiles if the chip's cores are known."""
        return self.gemm.seconds(m, k, n, peak=self.chip.bf16_flops)

    def straggler_share(self, devices: np.ndarray | float) -> Any:
        """Returns the share of a step for which devices wait for the slowest device.

        The largest of n normal draws lies sqrt(2 ln n) standard deviations above their mean, for large n. Source:
        Cramer (1946), Mathematical Methods of Statistics, section 28.6.
        """
        return self.jitter * np.sqrt(2 * np.log(np.maximum(devices, 1.0)))

    def stream(self, size: np.ndarray | float) -> Any:
        """Returns the seconds of reading or writing this many bytes of device memory."""
        return size / (self.chip.bandwidth * self.streaming)

    def kernels(self, size: np.ndarray | float, count: np.ndarray | float) -> Any:
        """Returns the seconds of `count` kernels that move this many bytes in total, each at least the smallest's."""
        return np.maximum(self.stream(size), count * SMALLEST_KERNEL)

    def members(self, group: np.ndarray | float, stride: np.ndarray | float) -> Any:
        """Returns the number of devices of a group in one node; neighbours in the group are `stride` devices apart.

        If group x stride and the node's size do not divide each other, some groups straddle two nodes, and the smaller
        part counts: 1 for groups of three devices on nodes of eight.
        """
        part = np.gcd(np.asarray(group) * stride, self.per_node)
        return np.clip(part // np.maximum(stride, 1), 1, group)

    def for_devices(self, devices: int) -> "Hardware":
        """Returns this hardware for a number of devices; if they are fewer than `per_node`, the node is smaller."""
        return replace(self, per_node=devices) if devices < self.per_node else self

    def gather(
        self,
        size: np.ndarray | float,
        group: np.ndarray | float,
        stride: np.ndarray | float,
        *,
        members: Any = None,
        pieces: np.ndarray | float = 1,
    ) -> Any:
        """Returns the seconds of an all-gather or a reduce-scatter over `group` devices, of `size` bytes unsharded.

        Neighbours in the group are `stride` devices apart, so a node holds per_node / stride of them, or `members` if
        given. One ring passes through all members of a node and then through their NICs to the next node: every link
        carries (group - 1) / group of the bytes, and each hop adds its latency. The result is the time of the slower
        level plus `TOGETHER` times that of the faster one. An all-reduce is both collectives and takes twice as long.
        With `pieces` consecutive collectives the bytes are the same, and each piece has its own launch and hops.

        Sources: Thakur, Rabenseifner, Gropp (2005), section 4; NCCL, src/graph/tuning.cc: the latency of its ring is
        that of its steps inside nodes and of its steps between nodes, of which there is one per node.
        """
        members = self.members(group, stride) if members is None else members
        nodes = np.ceil(group / members)
        inside_cost = np.where(np.greater(members, 1), 1 / self.inside.bandwidth, 0.0)
        between_cost = np.where(nodes > 1, 1 / (members * self.between.bandwidth), 0.0)
        pace = np.maximum(inside_cost, between_cost) + TOGETHER * np.minimum(inside_cost, between_cost)
        hops = nodes * (members - 1) * self.inside.latency + (nodes - 1) * self.between.latency
        wire = size * pace * (group - 1) / group
        return np.where(np.asarray(group) > 1, pieces * (self.launch + hops) + wire, 0.0)

    def send(self, size: np.ndarray | float, stride: np.ndarray | float, stages: np.ndarray | float) -> Any:
        """Returns the seconds of a message from every stage to the next, and from the last to the first.

        A tick ends with its slowest message. Stages are `stride` devices apart: unless the devices of all `stages` are
        in one node, some message of each tick crosses nodes.
        """
        crosses_nodes = np.asarray(stride) * stages > self.per_node
        latency = np.where(crosses_nodes, self.between.latency, self.inside.latency)
        return self.launch + latency + size / np.where(crosses_nodes, self.between.bandwidth, self.inside.bandwidth)


def _chip(key: str) -> Chip:
    return next(chip for chip in CHIPS if chip.key == key)


USUAL = 8  # chips of a machine if the chip's sheet does not state them


def _scaled_to(reference: Hardware, key: str, *, top: float = 0.0, why: str = "") -> Hardware:
    """Returns nodes of another chip with the same shares of its own sheet, and the same seconds of matmuls' fixed cost.

    If the chip's sheet does not state the network, `between` equals `inside`: see `known_machines`.

    Args:
      reference: Hardware with fitted constants.
      key: Key of the other chip.
      top: Its published share of the peak in very large matmuls; 0 if not published.
      why: Source of `top`.
    """
    chip, sheet = _chip(key), reference.chip
    link = lambda link, target, base: replace(link, bandwidth=link.bandwidth * (target / base))  # noqa: E731
    half = reference.gemm.half * (chip.bf16_flops / sheet.bf16_flops)
    cores, assumed = chip.gpu.cores if chip.gpu else 0, f"assumed as on {sheet.key.upper()}"
    node_note = "" if chip.domain else f"machines of {USUAL} assumed; "
    inside_link = link(reference.inside, chip.nvlink, sheet.nvlink)
    gemm = replace(reference.gemm, half=half, cores=cores, source=f"{assumed}; {reference.gemm.source}")
    return replace(
        reference, chip=chip, per_node=chip.domain or USUAL, inside=inside_link,
        between=link(reference.between, chip.network, sheet.network or 1.0) if chip.network else inside_link,
        gemm=replace(gemm, top=top, source=why) if top else gemm,
        source=f"{node_note}{assumed}; {reference.source}",
    )  # fmt: skip


def known_machines(
    hardware: Hardware, devices: int, per_node: int | None, between: float, *, option_text: OptionText = flag_text
) -> Hardware:
    """Returns the machines of a known chip for a plan.

    Args:
      hardware: One of `HARDWARE`.
      devices: Devices of the plan.
      per_node: Chips of a machine; None means the hardware's.
      between: The user's bytes per second of one chip to other machines; 0 if not given.
      option_text: Formats options in errors.

    Raises:
      JaxparError: If there are several machines, and neither the chip's sheet nor `between` states the network.
    """
    size = hardware.per_node if per_node is None else per_node
    if devices > size and not between and hardware.chip.network is None:
        raise refuse(
            f"{devices} x {hardware.chip.name} on machines of {size}",
            rule="a plan over several machines needs the bandwidth between them, which no sheet of this chip states",
            fix=f"{option_text('between', '12.5GB')}, of one GPU's share of the network; or "
            f"{option_text('per_node', devices)}",
        )
    return replace(hardware, per_node=size)


STREAMING, FAR = 0.85, 10e-6  # share of the memory's bandwidth, latency to another node: assumed for every chip
_LINKS = (
    'shares of the sheet seen in nccl-tests; NVLink .8 on A100, .82 on H100: "protocol overhead (~20%)", 370 of 450 '
    "GB/s (NVIDIA/nccl-tests issue 212); NICs .92: 46 of 50 GB/s (issue 290); both at once 324 GB/s on 4 x 8 H100; "
    "latencies and .85 of the memory's bandwidth assumed; jitter as fitted on published runs"
)
# fitted on 133 published runs, all chips and stacks together; `python -m tests.bench.planner --leave-out group` prints
# them
WAVE, RAGGED, JITTER = 1.63e-6, 0.214, 0.0118
_PUBLISHED = "fitted on 133 published runs, power and clocks under load in it"
_CURVE = "half: Calculon's steps for A100, .95, .9 and .6 of the peak from 128, 16 and 1 GFLOP on, drawn as a curve"
_FITTED: Mapping[str, Hardware] = {
    "a100": Hardware(
        chip=_chip("a100"), per_node=8,
        inside=Link(latency=3e-6, bandwidth=0.8 * 300e9), between=Link(latency=FAR, bandwidth=0.92 * 25e9),
        gemm=Gemm(
            top=0.817, half=2.4e9, wave=WAVE, ragged=RAGGED, cores=108, source=f"{_PUBLISHED}; {_CURVE}",
        ),
        streaming=STREAMING, launch=10e-6, jitter=JITTER, source=_LINKS,
    ),
    "h100": Hardware(
        chip=_chip("h100"), per_node=8,
        inside=Link(latency=3e-6, bandwidth=0.82 * 450e9), between=Link(latency=FAR, bandwidth=0.92 * 50e9),
        gemm=Gemm(
            top=0.711, half=7.6e9, wave=WAVE, ragged=RAGGED, cores=132,
            source=f"{_PUBLISHED}; {_CURVE}, as long on this chip",
        ),
        streaming=STREAMING, launch=10e-6, jitter=JITTER, source=_LINKS,
    ),
}  # fmt: skip
HARDWARE: Mapping[str, Hardware] = {
    **_FITTED,
    "h200": _scaled_to(_FITTED["h100"], "h200"),
    **{key: _scaled_to(_FITTED["h100"], key) for key in ("b200", "b300", "gb200", "gb300", "gh200")},
    **{key: _scaled_to(_FITTED["h100"], key) for key in ("l40s", "a10", "rtx4090", "rtx5090")},
    "mi300x": _scaled_to(
        _FITTED["h100"],
        "mi300x",
        top=0.474,
        why="620 of 1,307 TFLOPS in bf16 matmuls by torch: SemiAnalysis, MI300X vs H100 vs H200 (December 2024)",
    ),
}


def cap(hardware: Hardware, *, peak: float, bandwidth: float, source: str) -> Hardware:
    """Returns the hardware with a chip below its data sheet: a lower power limit, older memory.

    Args:
      hardware: Hardware with the chip of the data sheet.
      peak: bfloat16 FLOP per second.
      bandwidth: Bytes per second of device memory.
      source: Source of both.
    """
    return replace(hardware, chip=replace(hardware.chip, bf16_flops=peak, bandwidth=bandwidth, source=source))
