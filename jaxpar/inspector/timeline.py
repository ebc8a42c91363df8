"""Models the time of a compiled step, on one stream of computation and one of communication per set of mesh axes.

XLA has fixed the order in which instructions start, so replaying them with a modelled duration each gives the time of
the step. No number is measured:

* matmuls run at `MATMULS` of the chip's peak, or as fast as memory allows;
* other kernels take as long as XLA's cost model states, at most the time of their memory traffic, at least `KERNEL`;
* a collective takes `LAUNCH` + hops x latency + wire bytes / (`LINE` x bandwidth). Within a node the bandwidth is
  NVLink's; a group that spans nodes has the network ports of all its members in a node. A collective lasts as long
  as its slowest group: a permute is slow if a single pair of devices is on different nodes.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from jaxpar.errors import refuse
from jaxpar.hlo.bytes_accessed import bytes_accessed
from jaxpar.hlo.flop import op_flop, operand_dtype
from jaxpar.hlo.replica_groups import (
    attribute_text,
    axes_of_groups,
    axes_of_pairs,
    most_nodes,
    parse_groups,
    parse_pairs,
)
from jaxpar.hlo.text import Module, Op
from jaxpar.hlo.trip_counts import is_sync, trip_count, walk
from jaxpar.mesh.chips import Chip
from jaxpar.mesh.collective import KINDS, wire_bytes

MATMULS = 0.74  # share of peak: reproduces two published 70B runs on 64 and 128 H100s to -7 and -10 %
LINE = 0.8  # share of line rate: published nccl-tests on 4 x 8 H100 reach 324 GB/s of 400 in all-gathers
KERNEL = 2e-6  # seconds to start a small kernel: assumed
LAUNCH = 8e-6  # seconds to start a collective: assumed
HOP = {"node": 1e-6, "network": 4e-6}  # seconds per hop of a tree: assumed
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all")
_MOST_EVENTS = 4000


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """A kernel or a collective on the timeline.

    Attributes:
      stream: `compute`, or the mesh axes of a collective.
      start: Seconds from the beginning of the step.
      end: Seconds from the beginning of the step.
      name: The operation.
    """

    stream: str
    start: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A modelled step.

    Attributes:
      seconds: Duration of the step.
      compute: Seconds of kernels.
      communication: Maps each stream to the seconds of its collectives, overlapped with computation or not.
      exposed: Maps each stream to the seconds in which computation waits for its collectives.
      events: The first events, for a picture.
      unknown: Whether the step has a loop with an unknown trip count, which counts as one iteration.
    """

    seconds: float
    compute: float
    communication: dict[str, float]
    exposed: dict[str, float]
    events: tuple[TimelineEvent, ...]
    unknown: bool


def replay(module: Module, sizes: dict[str, int], chip: Chip, per_node: int) -> Timeline:
    """Models the timeline of one device.

    Args:
      module: A scheduled module, compiled for GPUs.
      sizes: Sizes of the mesh axes by name, outermost first.
      chip: The GPU.
      per_node: Number of GPUs that NVLink joins.
    """
    player = _Player(module, sizes, chip, per_node)
    player.run(module.entry)
    for stream, free in player.free.items():  # the step ends when the last collective has ended
        player.wait(stream, free)
    return Timeline(
        seconds=player.now, compute=player.compute, communication=dict(player.busy), exposed=dict(player.exposed),
        events=tuple(player.events), unknown=player.unknown,
    )  # fmt: skip


def price_kernels(module: Module, sizes: dict[str, int], chip: Chip, per_node: int) -> dict[str, float]:
    """The modelled seconds of each kernel in one step, by the name of its instruction, loops included.

    Args: those of `replay`. Collectives are left out: their time depends on when they begin.
    """
    player = _Player(module, sizes, chip, per_node)
    result: dict[str, float] = {}
    guards = {name for _, op in module.ops() for name in op.condition}  # of loops; `replay` skips them, too
    for visit in walk(module):
        op = visit.op
        calls = op.opcode in ("while", "conditional", "call", "async-start", *_FREE)
        waits = op.opcode.endswith(("-done", "-update"))
        if visit.in_fusion or visit.computation in guards or calls or waits or player.collective(visit.computation, op):
            continue
        result[op.name] = player.kernel(visit.computation, op) * (visit.times or 1)
    return result


class _Player:
    def __init__(self, module: Module, sizes: dict[str, int], chip: Chip, per_node: int):
        self.module, self.sizes, self.chip, self.per_node = module, sizes, chip, per_node
        self.now = self.compute = 0.0
        self.free: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.ends: dict[tuple[str, str], tuple[str, float]] = {}
        self.events: list[TimelineEvent] = []
        self.unknown = False
        self.prices: dict[str, float] = {}

    def run(self, computation: str) -> None:
        for op in self.module.computations[computation]:
            if op.opcode in _FREE:
                continue
            collective = self.collective(computation, op)
            # an `async-start` wraps a collective or plain computation: only the latter runs on the compute stream
            if op.opcode == "while":
                self._loop(op)
            elif op.opcode in ("call", "async-start") and op.callees and not collective:
                self.run(op.callees[0])
            elif op.opcode == "conditional":
                self._longest(op)
            elif collective:
                stream, seconds, name = collective
                # collectives of one stream share its links: the next begins when the previous one has ended
                start = max(self.now, self.free[stream])
                end = start + seconds
                self.free[stream] = end
                self.busy[stream] += seconds
                self._note(stream, start, end, name)
                if op.opcode.endswith("-start") and not is_sync(op):
                    self.ends[computation, op.name] = (stream, end)
                else:
                    self.wait(stream, end)
            elif op.opcode.endswith(("-done", "-update")):
                for name in op.operands:
                    if (computation, name) in self.ends:
                        self.wait(*self.ends.pop((computation, name)))
            else:
                seconds = self.kernel(computation, op)
                self._note("compute", self.now, self.now + seconds, op.label.rsplit("/", 1)[-1] or op.opcode)
                self.now += seconds
                self.compute += seconds

    def wait(self, stream: str, end: float) -> None:
        if end > self.now:
            self.exposed[stream] += end - self.now
            self.now = end

    def _note(self, stream: str, start: float, end: float, name: str) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(TimelineEvent(stream, start, end, name))

    def _loop(self, op: Op) -> None:
        """Replays three iterations; the others take as long as the third."""
        trips = trip_count(op)
        if trips is None:
            self.unknown, trips = True, 1
        previous = (0.0, 0.0, {}, {})
        # the first iteration starts with idle streams and the second may wait for it: the third is taken as steady
        for _ in range(min(trips, 3)):
            previous = (self.now, self.compute, dict(self.busy), dict(self.exposed))
            self.run(op.callees[0])
        if (remaining := trips - 3) > 0:
            now, compute, busy, exposed = previous
            step = self.now - now
            self._note("compute", self.now, self.now + remaining * step, f"{remaining} more turns of the loop")
            for stream in self.busy:  # a collective in flight after the third iteration is in flight after the last
                self.busy[stream] += remaining * (self.busy[stream] - busy.get(stream, 0.0))
                self.free[stream] += remaining * step
            for stream in self.exposed:
                self.exposed[stream] += remaining * (self.exposed[stream] - exposed.get(stream, 0.0))
            self.compute += remaining * (self.compute - compute)
            self.now += remaining * step

    def _longest(self, op: Op) -> None:
        """Replays every branch from the same state, and continues with the one that ends last."""
        best: _Player | None = None
        for name in op.callees:
            branch = _Player(self.module, self.sizes, self.chip, self.per_node)
            branch.__dict__.update(
                {key: value.copy() if hasattr(value, "copy") else value for key, value in self.__dict__.items()}
            )
            branch.run(name)
            best = branch if best is None or branch.now > best.now else best
        if best:
            self.__dict__.update(best.__dict__)

    def kernel(self, computation: str, op: Op) -> float:
        """Returns the seconds of one kernel."""
        key = f"{computation}/{op.name}"
        if key not in self.prices:
            self.prices[key] = self._price(computation, op)
        return self.prices[key]

    def _price(self, computation: str, op: Op) -> float:
        parts = [(name, part) for name in op.callees for part in self.module.computations[name]]
        # a fusion's FLOP are those of the matmuls inside it
        matmuls = [(name, part) for name, part in [(computation, op), *parts] if op_flop(self.module, name, part)]
        bytes_ = bytes_accessed(self.module, computation, op)
        if matmuls:
            seconds = 0.0
            for name, part in matmuls:
                dtype = operand_dtype(self.module, name, part)
                peak = self.chip.f32_flops if dtype in ("f32", "f64") else self.chip.bf16_flops
                seconds += op_flop(self.module, name, part) / (MATMULS * peak)
            return max(seconds, bytes_ / self.chip.bandwidth, KERNEL)
        stated = max([entry.get("exec_time_us") or 0.0 for entry in op.config.get("reification_cost", [])], default=0.0)
        # XLA knows the part of an operand that a kernel reads; without that knowledge it may state hours
        seconds = min(stated * 1e-6, bytes_ / self.chip.bandwidth) if stated else bytes_ / self.chip.bandwidth
        return max(seconds, KERNEL)

    def collective(self, computation: str, op: Op) -> tuple[str, float, str] | None:
        """Returns (stream, seconds, name) if an instruction is a collective or wraps one."""
        kind = op.opcode.removesuffix("-start")
        if kind in KINDS:
            return self._collective_price(computation, op, kind)
        if op.opcode in ("fusion", "fusion-start", "async-start"):
            for name in op.callees:
                for nested_op in self.module.computations[name]:  # the wrapper of an asynchronous or fused collective
                    if nested_op.opcode in KINDS:
                        return self._collective_price(name, nested_op, nested_op.opcode)
        return None

    def _collective_price(self, computation: str, op: Op, kind: str) -> tuple[str, float, str] | None:
        ops_by_name = self.module.ops_by_name[computation]
        payload = sum(ops_by_name[name].bytes for name in op.operands)
        if kind == "collective-permute":
            pairs = parse_pairs(attribute_text(op.attributes, "source_target_pairs"), self.module.partitions)
            axes, members, group = axes_of_pairs(pairs, self.sizes), pairs, 2
        else:
            members = parse_groups(attribute_text(op.attributes, "replica_groups"), self.module.partitions)
            axes, group = axes_of_groups(members, self.sizes), members.shape[1]
        if group == 1 or not len(members) or not axes:  # without axes, devices permute with themselves
            return None
        payload *= group if kind == "all-gather" else 1  # payload of a gather is its result
        nodes = most_nodes(members, self.per_node)
        rate, hop = self.chip.nvlink, HOP["node"]
        if nodes > 1:
            if self.chip.network is None:
                raise refuse(
                    f"a time of {self.chip.name} over several machines",
                    rule="a time over several machines needs a chip whose network is known",
                    fix="one machine",
                )
            # all members in a node send through their own ports, and no faster than NVLink brings them their data
            rate, hop = min(self.chip.nvlink, group / nodes * self.chip.network), HOP["network"]
        seconds = LAUNCH + hop * math.ceil(math.log2(group)) + wire_bytes(kind, payload, group) / (LINE * rate)
        return ",".join(axes), seconds, kind
