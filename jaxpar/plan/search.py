"""Ranks all legal layouts that fit by step time; among layouts within a margin the simplest comes first."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError, refuse
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import select, select_one
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory
from jaxpar.plan.model.layer_time import pcie_seconds
from jaxpar.plan.model_protocol import LayoutCosts, Model
from jaxpar.plan.sensitivity import Points, changes, pareto
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.plan.time import StepTime
from jaxpar.units import show_bytes

SPARE = 0.05  # share of the memory that stays free: predictions are off by about as much
# additional share if a stage has several chunks (compiled bytes were up to 9 % more), or if a table splits backwards:
# of an 8B model on 16 H100s, zb_v compiled to 57.9 GiB for 52.0 predicted, zb_h1 to 69.9 for 63.3, 11 and 10 % more
CHUNK_SPARE = 0.05
WIDE = 512  # devices that share state; a layout with more has to be faster by a margin
ROUNDING = 1e-9  # relative difference of sums in another order
MARGIN = 0.05  # a more complicated layout wins if it is faster by more than this share


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a plan: model, devices, batch, and what a search may vary.

    Attributes:
      model: The model.
      devices: Number of devices.
      rows: Examples of the global batch.
      hardware: The machines.
      software: The software model of the training program.
      choices: Options besides the mesh.
      memory: Bytes of a device that a program may use; 0 means the hardware's.
      memory_source: Source of `memory`, as text.
      spare: Share of the memory that stays free; pipelines with chunks or split backwards leave `CHUNK_SPARE` more.
      steps: Steps of the whole run, for its cost; 0 if unknown.
      price: Price of a GPU-hour, in any currency; 0 if unknown.
      margin: Share by which a more complicated layout must be faster, on one node; for several nodes see `slack`.
    """

    model: Model
    devices: int
    rows: int
    hardware: Hardware
    software: SoftwareModel
    choices: Choices = field(default_factory=Choices)
    memory: int = 0
    memory_source: str = ""
    spare: float = SPARE
    margin: float = MARGIN
    steps: int = 0
    price: float = 0.0

    @property
    def memory_limit(self) -> int:
        """Bytes of a device that a program may use."""
        return self.memory or self.hardware.chip.usable_memory

    @property
    def slack(self) -> float:
        """The share by which the simplest layout may be slower than the fastest: the margin / sqrt(nodes).

        The cost of a slower step grows with the GPUs; simplicity only saves a person's time.
        """
        nodes = max(1.0, self.devices / self.hardware.per_node)
        return self.margin / nodes**0.5

    def limit(self, candidate: Candidate) -> Any:
        """Returns the largest predicted bytes of a layout that counts as fitting; some pipelines leave more free."""
        pipeline = self.software.spmd & np.greater(candidate.pipe, 1)
        return self.memory_limit * (
            1
            - self.spare
            - CHUNK_SPARE * (pipeline & (np.greater(candidate.chunks, 1) | candidate.schedule_traits.split))
        )

    def legal(self, devices: int = 0) -> Candidate:
        """Returns all legal layouts.

        Args:
          devices: Number of devices; 0 means the question's.

        Raises:
          JaxparError: If there is none, or none with the independent replicas that the exchange needs, or if the
            traffic of the exchange depends on the shapes of parameters.
        """
        if self.software.exchange.depends_on_shapes:
            raise refuse(
                f"a plan with exchange {self.software.exchange}",
                rule="a plan counts parameters per device, but the traffic of this exchange depends on their shapes",
                fix="a plan without it; jaxpar inspect JOB shows its traffic",
            )
        layouts = self.model.legal(devices=devices or self.devices, rows=self.rows, choices=self.choices)
        if self.software.spmd:
            layouts = select(layouts, self._storable(layouts, devices or self.devices))
        if not self.software.exchange.per_replica:
            return layouts
        independent = np.greater(layouts.data, 1) & np.equal(layouts.pipe, 1)
        independent = independent & (np.equal(layouts.context, 1) | np.equal(layouts.context_by, "gather"))
        if not independent.any():
            raise refuse(
                f"exchange {self.software.exchange} on {devices or self.devices:,} devices",
                rule="this exchange needs independent replicas: data=2 or more, without a pipeline, ring or Ulysses",
                fix="a global batch that 2 divides and more devices, or a job without the exchange",
            )
        return select(layouts, independent)

    def _storable(self, layouts: Candidate, devices: int) -> np.ndarray:
        """Returns a mask of the layouts that `compose` does not refuse for parameters in unequal shards."""
        storable = np.broadcast_to(self.model.storable(layouts), np.shape(layouts.pipe))
        if not storable.any():
            nearest = max(1, round(self.rows / devices)) * devices  # which `data` alone divides
            raise refuse(
                f"{devices:,} devices for {self.rows} examples: no layout stores its parameters in equal shards",
                rule="stages divide the layers or the model's dim, shards a dim of every large parameter, and replicas "
                "the examples",
                fix=f"a global batch of {nearest}, or another number of devices",
            )
        return storable

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Axes and schedules that the search leaves out, each with the reason or the option that includes it."""
        return self.model.exclusions(self.choices)

    @property
    def costs(self) -> LayoutCosts:
        """Bytes, seconds and collectives of layouts."""
        return self.model.costs(self.software)

    def bytes(self, candidate: Candidate) -> Memory:
        """Returns the bytes of the fullest device, by cause."""
        return self.costs.memory(candidate)

    def seconds(self, candidate: Candidate) -> StepTime:
        """Returns the seconds of a step, by cause."""
        return self.costs.time(candidate, self.hardware.for_devices(self.devices))


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A layout with its predicted time and memory.

    Attributes:
      candidate: The layout.
      time: Seconds of a step, by cause.
      memory: Bytes of the fullest device, by cause.
      host: Bytes of layer inputs that a device keeps in host memory during a step.
      pcie_copy: Seconds per step of copying them to the host, hidden or not; copying them back takes as long. 0 if the
        chip's PCIe bandwidth is unknown.
    """

    candidate: Candidate
    time: StepTime
    memory: Memory
    host: float = 0.0
    pcie_copy: float = 0.0

    def __str__(self) -> str:
        return describe(self.candidate)

    def to_dict(self) -> dict[str, Any]:
        """Returns the layout, seconds and bytes by cause, and any host memory, for JSON."""
        host = {"host": {"bytes": self.host, "seconds_each_way": self.pcie_copy}} if self.host else {}
        costs = {"seconds": dict(self.time), "bytes": dict(self.memory), "how": "modelled"}
        return asdict(self.candidate) | costs | host

    def slower_causes(self, reference: "Ranked") -> list[tuple[str, float]]:
        """Returns (cause, additional seconds) of the causes that take longer than in another layout, largest first."""
        causes = dict.fromkeys((*self.time, *reference.time))
        differences = [(cause, self.time.get(cause, 0.0) - reference.time.get(cause, 0.0)) for cause in causes]
        return sorted(((cause, seconds) for cause, seconds in differences if seconds > 0), key=lambda item: -item[1])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ranked layouts for a question.

    Attributes:
      question: The question.
      best: Layouts, one per mesh, ZeRO stage and form of context. The first is the simplest of all that are about as
        fast as the fastest (within a margin); the others are sorted by time.
      fastest: The fastest layout, which may be the first.
      considered: Number of legal layouts.
      fitting: Number of layouts that fit.
      sensitivity: Maps each changed assumption of `jaxpar.plan.sensitivity` to the layout that would be first with it.
      points: Time and memory of all compared layouts.
    """

    question: Question
    best: tuple[Ranked, ...]
    fastest: Ranked
    considered: int
    fitting: int
    sensitivity: dict[str, Ranked]
    points: Points

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Axes, schedules and layouts that are not compared, each with the reason or the option that includes it."""
        count, margin = self.fitting - len(self.points.seconds), f"{self.question.margin:.0%}"
        axes = " or ".join(axis for axis, entry in TECHNIQUES.items() if entry.blocks_layers)
        width = f", or fsdp over more than {WIDE} devices" * bool(self.question.devices > WIDE)
        reason = f"{axes} on several nodes{width}, {count:,} layouts that fit: none is faster by more than {margin}"
        return (*self.question.exclusions, *[reason] * bool(count))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        return {
            "considered": self.considered,
            "fitting": self.fitting,
            "left_out": list(self.exclusions),
            "best": [ranked.to_dict() for ranked in self.best],
            "fastest": self.fastest.to_dict(),
            "doubts": {assumption: ranked.to_dict() for assumption, ranked in self.sensitivity.items()},
            "pareto": [
                {"layout": describe(select_one(self.points.layouts, i)), "seconds": float(self.points.seconds[i]),
                 "bytes": float(self.points.bytes[i]), "how": "modelled"}
                for i in self.points.pareto.tolist()
            ],
        }  # fmt: skip


def search(question: Question, *, top: int = 10) -> Plan:
    """Ranks all legal layouts that fit with memory to spare, or all that fit if none does: see `Question.spare`.

    Raises:
      JaxparError: If there is no legal layout, or none fits; it states the missing memory and a change that would fit.
    """
    question, considered, fitting, sizes = _fitting(question)
    time = question.seconds(fitting)
    seconds, order = time.total, _order(question, fitting, time.total, sizes)
    best, compared = _distinct_layouts(fitting, order)[:top], np.sort(order)
    return Plan(
        question=question,
        best=tuple(predict(question, select_one(fitting, int(i))) for i in best),
        fastest=predict(question, select_one(fitting, int(order[np.argmin(seconds[order])]))),
        considered=considered,
        fitting=len(sizes),
        sensitivity=_best_if_changed(question, fitting, time, sizes),
        points=Points(layouts=select(fitting, compared), seconds=seconds[compared], bytes=sizes[compared]),
    )


def first_layout(question: Question) -> Ranked:
    """Returns the first layout of `search`.

    Raises:
      JaxparError: As `search` does.
    """
    question, _, fitting, sizes = _fitting(question)
    order = _order(question, fitting, question.seconds(fitting).total, sizes)
    return predict(question, select_one(fitting, int(order[0])))


def _fitting(question: Question) -> tuple[Question, int, Candidate, np.ndarray]:
    """Returns the question, the number of legal layouts, the layouts that fit, and their bytes.

    If none leaves memory to spare, those that fit without are returned, with a question that spares none.
    """
    candidates = question.legal()
    sizes = question.bytes(candidates).total
    for asked in (question, replace(question, spare=0.0)):
        fits = np.flatnonzero(sizes <= asked.limit(candidates))
        if len(fits):
            return asked, len(sizes), select(candidates, fits), sizes[fits]
    raise _fits_nowhere(question, candidates, sizes)


def predict(question: Question, candidate: Candidate) -> Ranked:
    """Predicts time and memory of one layout, as Python numbers."""
    host_bytes = question.costs.host_bytes(candidate)
    return Ranked(
        candidate=candidate,
        time=question.seconds(candidate).plain,
        memory=question.bytes(candidate).plain,
        host=host_bytes,
        pcie_copy=candidate.microbatches * host_bytes * pcie_seconds(question.hardware),
    )


def complexity(candidate: Candidate) -> Any:
    """Returns the complexity of a layout: a weight per axis, and less for chunks, remat, sequence and microbatches."""
    above_one = lambda value: np.greater(value, 1).astype(int)  # noqa: E731
    axes = sum(technique.complexity * above_one(candidate.size(axis)) for axis, technique in TECHNIQUES.items())
    options = above_one(candidate.chunks) + np.not_equal(candidate.remat, "none") + np.asarray(candidate.sequence)
    return axes + options / 4 + above_one(candidate.microbatches) / 8


def _order(question: Question, fitting: Candidate, seconds: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Returns the indices of the compared candidates by time, with one within the margin moved to the front.

    It is the simplest on the Pareto front of time and memory; of equally simple candidates that are as fast, within a
    fifth of the margin, the one that needs the least memory.
    """
    order = np.argsort(seconds, kind="stable")
    order = order[_comparison_mask(question, fitting, seconds)[order]]
    close = order[seconds[order] <= seconds[order[0]] * (1 + question.slack)]
    close = close[pareto(seconds[close], needed[close])]  # any layout that beats one of them is also close
    levels = complexity(select(fitting, close))
    simplest = close[levels == levels.min()]
    fast_simplest = simplest[seconds[simplest] <= seconds[simplest[0]] * (1 + question.slack / 5)]
    first = fast_simplest[np.argmin(needed[fast_simplest])]
    return np.concatenate([[first], order[order != first]])


def _comparison_mask(question: Question, fitting: Candidate, seconds: np.ndarray) -> np.ndarray:
    """Returns a mask of the compared layouts: unusual ones are compared only if one is faster by the margin.

    Unusual are tensor on several nodes, and state over more than `WIDE` devices. Collectives of a technique that is
    `near`, such as tensor, block every layer; across nodes they share NICs with gradients and pipeline messages, and no
    formula here models that contention. Source: Narayanan et al. 2021, arXiv:2104.04473, section 3.2: tensor up to the
    GPUs of a server, pipelines across servers.
    Rings over hundreds of devices wait in every layer for the slowest hop, while the formulas have the mean; and no run
    that the constants are fitted on shards over more than 512 devices.
    """
    axes = [axis for axis, entry in TECHNIQUES.items() if entry.blocks_layers]
    spans = [np.where(np.greater(fitting.size(axis), 1), fitting.size(axis) * fitting.stride(axis), 1) for axis in axes]
    node = question.hardware.for_devices(question.devices).per_node
    within_node = np.all([node % entry == 0 for entry in spans], axis=0)  # otherwise some groups straddle two nodes
    usual = within_node & np.less_equal(fitting.fsdp, WIDE)
    if usual.all() or not usual.any():
        return np.full(len(usual), True)
    return usual | (seconds[~usual].min() * (1 + question.margin) < seconds[usual].min())


def _distinct_layouts(fitting: Candidate, order: np.ndarray) -> list[int]:
    """Returns the first of every mesh, ZeRO stage and form of context, in order."""
    forms = np.unique(fitting.context_by, return_inverse=True)[1], fitting.ulysses, fitting.zero_context
    keys = np.stack([value[order] for value in (*fitting.sizes.values(), fitting.zero, *forms)], axis=1)
    first = np.sort(np.unique(keys, axis=0, return_index=True)[1])
    return order[first].tolist()


def _best_if_changed(question: Question, fitting: Candidate, time: StepTime, needed: np.ndarray) -> dict[str, Ranked]:
    """Returns the layout that each changed assumption would put first.

    Evaluates the fast layouts under the change, and then all that the change may make as fast. The first layout takes
    at most two margins longer than the fastest: one for layouts inside nodes, and one for simplicity.
    """
    tolerance, firsts = (1 + question.margin) ** 2, {}
    fast = select(fitting, np.flatnonzero(time.total <= time.total.min() * tolerance))
    for doubt in changes(question.hardware, question.software):
        variant = replace(question, hardware=doubt.hardware, software=doubt.software)
        best = variant.seconds(fast).total.min()
        indices = np.flatnonzero(doubt.lower_bound(time) <= best * tolerance * (1 + ROUNDING))
        close = select(fitting, indices)
        order = _order(variant, close, variant.seconds(close).total, needed[indices])
        firsts[doubt.description] = predict(variant, select_one(close, int(order[0])))
    return firsts


def _fits_nowhere(question: Question, candidates: Candidate, needed: np.ndarray):
    limit = question.limit(candidates)
    i = int(np.argmin(needed / limit))
    leanest = select_one(candidates, i)
    fix = f"a chip with {show_bytes(float(needed[i] / limit[i]) * question.memory_limit)}"
    for count in (question.devices * n for n in (2, 4, 8, 16)):
        try:
            layouts = question.legal(count)
        except JaxparError:  # more than the model and the batch can use
            continue
        if (question.bytes(layouts).total <= question.limit(layouts)).any():
            fix = f"{count} devices, or {fix}"
            break
    return refuse(
        f"{question.devices} devices with {show_bytes(question.memory_limit)} each, of which "
        f"{question.spare:.0%} stays free: "
        f"none of {len(needed):,} layouts fits; the leanest needs {show_bytes(float(needed[i]))} ({describe(leanest)})",
        rule="parameters, gradients, optimizer state and what the backward pass keeps fit the devices' memory",
        fix=fix,
    )


def describe(candidate: Candidate) -> str:
    """Returns a layout as a line: `pipe 4 x fsdp 8 (ZeRO-3), 1f1b_phased, 8 microbatches of 2, remat full`."""
    words = " x ".join(f"{axis} {size}" for axis, size in candidate.sizes.items() if size > 1) or "one device"
    axes = " over fsdp x context" * bool(candidate.zero_context)
    words += f" (ZeRO-{candidate.zero}{axes})" * bool(candidate.shards > 1) + ", sequence" * bool(candidate.sequence)
    if candidate.context_by != "gather":
        heads = f" x ulysses {candidate.ulysses}" * (candidate.context_by == "ring" and candidate.ulysses > 1)
        words += f", context by {candidate.context_by}{heads}"
    if candidate.pipe > 1:
        words += f", {candidate.schedule}" + f" of {candidate.chunks} chunks" * (candidate.chunks > 1)
        words += ", head spread" * (candidate.head == "spread")
    words += f", {candidate.microbatches} microbatches of {candidate.microbatch}" if candidate.microbatches > 1 else ""
    return words + f", remat {candidate.remat}" * (candidate.remat != "none")
