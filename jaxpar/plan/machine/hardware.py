"""The machines a plan is made for: chips in nodes, what they reach of their sheet, and the links between them.

    time of a matmul       by its shape: `gemm.py`
    time of the rest       bytes / (device memory's bandwidth x streaming)
    slowest of n devices   1 + jitter x sqrt(2 ln n) times as long as the mean

One set of constants holds for all runs on a family of chips; each says where it comes from.

Runs on A100 and H100 were there to fit. Other GPUs take the H100's shares of their own sheets and say "assumed", but
for MI300X, whose share of the peak is published. Where a sheet does not say how many chips a machine has, 8 are
assumed; where it does not say what joins machines, a plan for several asks (`known_machines`). A TPU's torus is not
nodes with NICs: it is planned for with a file of measurements, `plan/machine/file.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpar.errors import check_ranges, refuse
from jaxpar.mesh.chips import CHIPS, Chip
from jaxpar.mesh.links import Link
from jaxpar.plan.machine.gemm import Gemm

# share of the faster level's time that a collective over both levels takes besides the slower one's: all-gathers of
# nccl-tests reach 324 GB/s on 4 x 8 H100s, where either level alone reaches 368 and 369
TOGETHER = 0.136


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Nodes of one kind of chip.

    Attributes:
      chip: The chip, with its peaks.
      per_node: Chips of a node.
      inside: Link of a chip to the others of its node; bandwidth as collectives reach it.
      between: Link of a chip, through its own NIC, to other nodes; bandwidth as collectives reach it.
      gemm: Share of the peak in matmuls with weights.
      streaming: Share of the memory's bandwidth in elementwise ops.
      launch: Seconds a kernel or a collective takes before its first byte.
      jitter: Standard deviation of a step's time from device to device, as a share of it.
      pace: Times as long as all of this says that a step takes, as runs showed: `jaxpar.plan.measured.calibrate`.
      source: Where the numbers come from that the chip and the curve do not name.
    """

    chip: Chip
    per_node: int
    inside: Link
    between: Link
    gemm: Gemm
    streaming: float
    launch: float
    jitter: float = 0.0
    pace: float = 1.0
    source: str

    def __post_init__(self):
        shares = {"streaming": (1e-3, 1.0), "jitter": (0.0, 1.0), "pace": (1e-3, 1e3)}
        check_ranges(self, "hardware", {"per_node": (1, 2**31 - 1), "launch": (0.0, 1.0)} | shares)
        check_ranges(self.chip, "chip", {"bf16_flops": (1.0, 1e21), "bandwidth": (1.0, 1e18), "memory": (1, 2**60)})

    @property
    def memory(self) -> int:
        """Bytes of one chip's memory that a program may take."""
        return self.chip.usable

    def matmuls(self, flop: Any, count: Any = 1) -> Any:
        """Returns the seconds of `count` matmuls of `flop` FLOP each."""
        return count * flop / (self.chip.bf16_flops * self.gemm.share(flop))

    def matmul(self, m: Any, k: Any, n: Any) -> Any:
        """Returns the seconds of a matmul [m, k] x [k, n], by its tiles where the chip's cores are known."""
        return self.gemm.seconds(m, k, n, peak=self.chip.bf16_flops)

    def waits(self, devices: Any) -> Any:
        """Returns the share of a step that the others wait for the slowest of so many devices.

        The largest of n normal draws lies sqrt(2 ln n) standard deviations above their mean, for large n. Source:
        Cramer (1946), Mathematical Methods of Statistics, section 28.6.
        """
        return self.jitter * np.sqrt(2 * np.log(np.maximum(devices, 1.0)))

    def stream(self, size: Any) -> Any:
        """Returns the seconds in which so many bytes are read or written."""
        return size / (self.chip.bandwidth * self.streaming)

    def members(self, group: Any, stride: Any) -> Any:
        """Returns how many of a group whose neighbours are `stride` devices apart are in one node.

        Groups lie one after the other, so where group x stride and a node do not divide each other some of them
        straddle two nodes, of which the smaller part counts: of three devices on nodes of eight one.
        """
        part = np.gcd(np.asarray(group) * stride, self.per_node)
        return np.clip(part // np.maximum(stride, 1), 1, group)

    def holding(self, devices: int) -> "Hardware":
        """Returns the machines for so many devices: of a node that they do not fill, those alone."""
        return replace(self, per_node=devices) if devices < self.per_node else self

    def gather(self, size: Any, group: Any, stride: Any, *, members: Any = None, pieces: Any = 1) -> Any:
        """Returns the seconds of an all-gather to `size` bytes on each of `group` devices, or of a reduce-scatter.

        Neighbours in the group are `stride` devices apart, so a node holds per_node / stride of them, or as many
        `members` as are given. One ring passes through all members of a node and then through the NICs of all of them
        to the next: every link carries (group - 1) / group of the bytes, and takes alpha for each hop. The slower of
        the two levels sets the pace; `TOGETHER` of the other's time comes on top. An all-reduce is one of each: twice
        this. In `pieces` collectives, one after another, the bytes are the same and each piece has its own launch and
        hops.

        Sources: Thakur, Rabenseifner, Gropp (2005), section 4; NCCL, src/graph/tuning.cc: the latency of its ring is
        that of its steps inside nodes and of its steps between them, which are as many as nodes.
        """
        members = self.members(group, stride) if members is None else members
        nodes = np.ceil(group / members)
        inside = np.where(np.greater(members, 1), 1 / self.inside.bandwidth, 0.0)
        between = np.where(nodes > 1, 1 / (members * self.between.bandwidth), 0.0)
        pace = np.maximum(inside, between) + TOGETHER * np.minimum(inside, between)
        hops = nodes * (members - 1) * self.inside.latency + (nodes - 1) * self.between.latency
        wire = size * pace * (group - 1) / group
        return np.where(np.asarray(group) > 1, pieces * (self.launch + hops) + wire, 0.0)

    def send(self, size: Any, stride: Any, stages: Any) -> Any:
        """Returns the seconds of a message from every stage to the next, and from the last to the first.

        A tick ends with its slowest message. Stages are `stride` devices apart: the devices of all `stages` are one
        node's, or some boundary between two stages is one between nodes, wherever it lies in the table.
        """
        far = np.asarray(stride) * stages > self.per_node
        latency = np.where(far, self.between.latency, self.inside.latency)
        return self.launch + latency + size / np.where(far, self.between.bandwidth, self.inside.bandwidth)


def _chip(key: str) -> Chip:
    return next(chip for chip in CHIPS if chip.key == key)


USUAL = 8  # chips of a machine, where the sheet of a chip does not say it


def _as_on(known: Hardware, key: str, *, top: float = 0.0, why: str = "") -> Hardware:
    """Returns nodes of another chip that reaches the same shares of its own sheet; matmuls' fixed cost lasts as long.

    Args:
      known: What its constants were fitted on.
      key: A chip.
      top: Its share of the peak in matmuls without end, where that is published; 0 where it is not.
      why: Where.

    Returns:
      Them. Of a chip whose sheet does not say what joins machines `between` is `inside`: see `known_machines`.
    """
    chip, sheet = _chip(key), known.chip
    link = lambda link, mine, its: replace(link, bandwidth=link.bandwidth * (mine / its))  # noqa: E731
    half = known.gemm.half * (chip.bf16_flops / sheet.bf16_flops)
    cores, assumed = chip.gpu.cores if chip.gpu else 0, f"assumed as on {sheet.key.upper()}"
    alone = "" if chip.domain else f"machines of {USUAL} assumed; "
    inside = link(known.inside, chip.nvlink, sheet.nvlink)
    gemm = replace(known.gemm, half=half, cores=cores, source=f"{assumed}; {known.gemm.source}")
    return replace(
        known, chip=chip, per_node=chip.domain or USUAL, inside=inside,
        between=link(known.between, chip.network, sheet.network or 1.0) if chip.network else inside,
        gemm=replace(gemm, top=top, source=why) if top else gemm,
        source=f"{alone}{assumed}; {known.source}",
    )  # fmt: skip


def known_machines(hardware: Hardware, devices: int, per_node: int | None, between: float) -> Hardware:
    """Returns the machines of a known chip for a plan.

    Args:
      hardware: One of `HARDWARE`.
      devices: How many the plan is for.
      per_node: Chips of a machine; None is as many as usual.
      between: Bytes per second to other machines of one chip, as it is said; 0 where it is not.

    Raises:
      JaxparError: If there are several machines, and neither the chip's sheet nor `between` says what joins them.
    """
    size = hardware.per_node if per_node is None else per_node
    if devices > size and not between and hardware.chip.network is None:
        raise refuse(
            f"{devices} x {hardware.chip.name} on machines of {size}",
            rule="a plan over several machines knows what joins them, which no sheet of this chip says",
            fix=f"--between 12.5GB, of one GPU's share of the network; or --per-node {devices}",
        )
    return replace(hardware, per_node=size)


STREAMING, FAR = 0.85, 10e-6  # share of the memory's bandwidth, seconds to another node: assumed for every chip
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
    "h200": _as_on(_FITTED["h100"], "h200"),
    **{key: _as_on(_FITTED["h100"], key) for key in ("b200", "b300", "gb200", "gb300", "gh200")},
    **{key: _as_on(_FITTED["h100"], key) for key in ("l40s", "a10", "rtx4090", "rtx5090")},
    "mi300x": _as_on(
        _FITTED["h100"],
        "mi300x",
        top=0.474,
        why="620 of 1,307 TFLOPS in bf16 matmuls by torch: SemiAnalysis, MI300X vs H100 vs H200 (December 2024)",
    ),
}


def capped(hardware: Hardware, *, peak: float, bandwidth: float, source: str) -> Hardware:
    """Returns the hardware with a chip whose peak and memory are below the sheet's: a lower power limit, older memory.

    Args:
      hardware: What it is otherwise.
      peak: bfloat16 FLOP per second.
      bandwidth: Bytes per second of device memory.
      source: Where both come from.
    """
    return replace(hardware, chip=replace(hardware.chip, bf16_flops=peak, bandwidth=bandwidth, source=source))
