"""The best layout: every legal one is weighed, what does not fit is dropped, the simpler one wins ties."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError, refuse
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.choices import Choices
from jaxpar.plan.doubts import doubts
from jaxpar.plan.enumerate import at, pick
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory
from jaxpar.plan.model.layer_time import pcie_seconds
from jaxpar.plan.pareto import Points, pareto
from jaxpar.plan.planned import Model
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.plan.time import StepTime
from jaxpar.units import show_bytes

SPARE = 0.05  # of the memory stays free: predictions are off by about as much
# and so much more where a stage has several chunks, of which compiled bytes were up to 9 % more, or a table splits
# backwards: zb_v of an 8B model on 16 H100s 57.9 GiB for 52.0 by the formulas, zb_h1 69.9 for 63.3, 11 and 10 % more
CHUNKED = 0.05
WIDE = 512  # devices that share state, beyond which a layout has to be faster by a margin
ROUNDING = 1e-9  # by how large a share sums in another order may differ
MARGIN = 0.05  # a layout that is more complicated wins if it is faster by more than this share


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a plan.

    Attributes:
      model: Which model.
      devices: How many.
      rows: Of a step's global batch.
      hardware: Which machines.
      software: What the program does with them.
      choices: What may vary besides the mesh.
      memory: Bytes of a device that a program may use; 0 means the hardware's.
      why: Of which memory these are and who says so, in words.
      spare: Share of that which predictions leave free; pipelines with chunks, or that split backwards, leave `CHUNKED`
        more.
      steps: Of the whole run, for its cost; 0 where that is not told.
      price: Of a GPU-hour, in whatever money; 0 where nobody says it.
      margin: By how large a share a more complicated layout must be faster, on one node; on more see `slack`.
    """

    model: Model
    devices: int
    rows: int
    hardware: Hardware
    software: SoftwareModel
    choices: Choices = field(default_factory=Choices)
    memory: int = 0
    why: str = ""
    spare: float = SPARE
    margin: float = MARGIN
    steps: int = 0
    price: float = 0.0

    @property
    def room(self) -> int:
        """Bytes that a program may use."""
        return self.memory or self.hardware.memory

    @property
    def slack(self) -> float:
        """The share by which the simplest layout may be slower than the fastest: the margin, less on many nodes.

        A percent of a step costs as many GPU-hours as there are GPUs, and what simplicity saves is a person's time.
        """
        nodes = max(1.0, self.devices / self.hardware.per_node)
        return self.margin / nodes**0.5

    def limit(self, candidate: Candidate) -> Any:
        """Returns the bytes up to which a layout is taken to fit; some pipelines in one program leave more to spare."""
        pipeline = self.software.everywhere & np.greater(candidate.pipe, 1)
        return self.room * (1 - self.spare - CHUNKED * (pipeline & (np.greater(candidate.chunks, 1) | candidate.split)))

    def legal(self, devices: int = 0) -> Candidate:
        """Returns all layouts for these devices, or for so many.

        Raises:
          JaxparError: If there is none, or none with replicas that can step apart as the exchange wants. If what that
            sends follows from the shapes of parameters.
        """
        if self.software.exchange.of_shapes:
            raise refuse(
                f"a plan with exchange {self.software.exchange}",
                rule="a plan knows how many parameters a device holds, and what this exchange sends depends on shapes",
                fix="a plan without it; jaxpar inspect JOB says what it sends",
            )
        found = self.model.legal(devices=devices or self.devices, rows=self.rows, choices=self.choices)
        if self.software.everywhere:
            found = pick(found, self.model.storable(found))  # compose refuses the others
        if not self.software.exchange.apart:
            return found
        apart = np.greater(found.data, 1) & np.equal(found.pipe, 1)
        apart = apart & (np.equal(found.context, 1) | np.equal(found.context_by, "gather"))
        if not apart.any():
            raise refuse(
                f"exchange {self.software.exchange} on {devices or self.devices:,} devices",
                rule="replicas that step apart are data=2 or more, without a pipeline",
                fix="a global batch that 2 divides and more devices, or a job without the exchange",
            )
        return pick(found, apart)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Axes and schedules that no layout of the search has, each with the reason or the way to it."""
        return self.model.left_out(self.choices)

    def bytes(self, candidate: Candidate) -> Memory:
        """Returns what the fullest device needs."""
        return self.model.memory(candidate, self.software)

    def seconds(self, candidate: Candidate) -> StepTime:
        """Returns what a step takes."""
        return self.model.time(candidate, self.hardware.holding(self.devices), self.software)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A layout with what it is predicted to take.

    Attributes:
      candidate: The layout.
      time: Seconds of a step, by cause.
      memory: Bytes of the fullest device, by cause.
      host: Bytes of a device's layers that are in host memory while a step runs.
      over_pcie: Seconds of a step in which they are on their way there, and as many back, hidden or not; 0 where
        the chip's speed to its host is not known.
    """

    candidate: Candidate
    time: StepTime
    memory: Memory
    host: float = 0.0
    over_pcie: float = 0.0

    def __str__(self) -> str:
        return describe(self.candidate)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it: the layout, seconds and bytes by cause, and what is on the host, if anything."""
        away = {"host": {"bytes": self.host, "seconds_each_way": self.over_pcie}} if self.host else {}
        costs = {"seconds": dict(self.time), "bytes": dict(self.memory), "how": "modelled"}
        return asdict(self.candidate) | costs | away

    def slower(self, than: "Ranked") -> list[tuple[str, float]]:
        """Returns (cause, seconds more) against another, largest first, of what is more."""
        every = dict.fromkeys((*self.time, *than.time))
        more = [(cause, self.time.get(cause, 0.0) - than.time.get(cause, 0.0)) for cause in every]
        return sorted(((cause, seconds) for cause, seconds in more if seconds > 0), key=lambda each: -each[1])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
      question: What was asked.
      best: The layouts, one for each mesh and ZeRO stage, best first: the first is the simplest within the margin of
        the fastest, the others follow by time.
      fastest: The fastest of all, which may be the first.
      considered: Legal layouts.
      fitting: Those that fit.
      doubts: Each assumption that may be wrong, as `jaxpar.plan.doubts` has them, to what would then be first.
      points: All that fit and are compared, with time and memory.
    """

    question: Question
    best: tuple[Ranked, ...]
    fastest: Ranked
    considered: int
    fitting: int
    doubts: dict[str, Ranked]
    points: Points

    @property
    def left_out(self) -> tuple[str, ...]:
        """Axes and schedules that are not compared, each with the reason or the way to it."""
        apart, share = self.fitting - len(self.points.seconds), f"{self.question.margin:.0%}"
        near = " or ".join(axis for axis, each in TECHNIQUES.items() if each.near)
        wide = f", or fsdp over more than {WIDE} devices" * bool(self.question.devices > WIDE)
        several = f"{near} on several nodes{wide}, {apart:,} layouts that fit: none is faster by more than {share}"
        return (*self.question.left_out, *[several] * bool(apart))

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "considered": self.considered,
            "fitting": self.fitting,
            "left_out": list(self.left_out),
            "best": [each.to_dict() for each in self.best],
            "fastest": self.fastest.to_dict(),
            "doubts": {what: each.to_dict() for what, each in self.doubts.items()},
            "pareto": [
                {"layout": describe(at(self.points.layouts, i)), "seconds": float(self.points.seconds[i]),
                 "bytes": float(self.points.bytes[i]), "how": "modelled"}
                for i in self.points.pareto.tolist()
            ],
        }  # fmt: skip


def search(question: Question, *, top: int = 10) -> Plan:
    """Returns the layouts that are predicted to be fastest, of those that fit.

    Raises:
      JaxparError: If there is no legal layout, or none fits: how much is missing, and what would make it fit.
    """
    considered, fitting, needed = _fitting(question)
    time = question.seconds(fitting)
    seconds, order = time.total, _order(question, fitting, time.total, needed)
    best, compared = _one_of_each(fitting, order)[:top], np.sort(order)
    return Plan(
        question=question,
        best=tuple(weigh(question, at(fitting, int(i))) for i in best),
        fastest=weigh(question, at(fitting, int(order[np.argmin(seconds[order])]))),
        considered=considered,
        fitting=len(needed),
        doubts=_doubted(question, fitting, time, needed),
        points=Points(layouts=pick(fitting, compared), seconds=seconds[compared], bytes=needed[compared]),
    )


def first_of(question: Question) -> Ranked:
    """Returns what `search` puts first.

    Raises:
      JaxparError: As `search` does.
    """
    _, fitting, needed = _fitting(question)
    order = _order(question, fitting, question.seconds(fitting).total, needed)
    return weigh(question, at(fitting, int(order[0])))


def _fitting(question: Question) -> tuple[int, Candidate, np.ndarray]:
    """Returns how many legal layouts there are, those that fit, and their bytes."""
    candidates = question.legal()
    needed = question.bytes(candidates).total
    fits = np.flatnonzero(needed <= question.limit(candidates))
    if not len(fits):
        raise _fits_nowhere(question, candidates, needed)
    return len(needed), pick(candidates, fits), needed[fits]


def weigh(question: Question, candidate: Candidate) -> Ranked:
    """Returns one layout with its predictions, as plain numbers."""
    away = question.model.on_host(candidate)
    return Ranked(
        candidate=candidate,
        time=question.seconds(candidate).plain,
        memory=question.bytes(candidate).plain,
        host=away,
        over_pcie=candidate.microbatches * away * pcie_seconds(question.hardware),
    )


def complexity(candidate: Candidate) -> Any:
    """Returns how much there is to understand in a layout: axes first, then what is done besides."""
    more = lambda value: np.greater(value, 1).astype(int)  # noqa: E731
    axes = sum(each.complexity * more(candidate.size(axis)) for axis, each in TECHNIQUES.items())
    besides = more(candidate.chunks) + np.not_equal(candidate.remat, "none") + np.asarray(candidate.sequence)
    return axes + besides / 4 + more(candidate.microbatches) / 8


def _order(question: Question, fitting: Candidate, seconds: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Returns the indices of the candidates that are compared, by time, but one within the margin first.

    It is the simplest of those that no other one beats in both time and memory; of those that are as simple and as
    fast, within a fifth of the margin, the one that needs least memory.
    """
    order = np.argsort(seconds, kind="stable")
    order = order[_compared(question, fitting, seconds)[order]]
    close = order[seconds[order] <= seconds[order[0]] * (1 + question.slack)]
    close = close[pareto(seconds[close], needed[close])]  # what beats one of them is as close
    how = complexity(pick(fitting, close))
    simplest = close[how == how.min()]
    level = simplest[seconds[simplest] <= seconds[simplest[0]] * (1 + question.slack / 5)]
    first = level[np.argmin(needed[level])]
    return np.concatenate([[first], order[order != first]])


def _compared(question: Question, fitting: Candidate, seconds: np.ndarray) -> np.ndarray:
    """Returns which layouts are compared: unusual ones only where one of them is faster by the margin.

    Those are tensor on several nodes, and state over more than `WIDE` devices. A technique that is `near`, as tensor
    is, stands in the way of every layer with its collectives, and over nodes these meet gradients and the messages of
    stages in the same NICs, which no formula here knows of. Source: Narayanan et al. 2021, arXiv:2104.04473, section
    3.2: tensor up to the GPUs of a server, pipelines across servers.
    Rings over hundreds of devices wait for the latest of them in every layer, where a formula has means of their hops,
    and no run that the constants are fitted on shards over more than 512.
    """
    near = [axis for axis, each in TECHNIQUES.items() if each.near]
    span = [np.where(np.greater(fitting.size(axis), 1), fitting.size(axis) * fitting.stride(axis), 1) for axis in near]
    node = question.hardware.holding(question.devices).per_node
    inside = np.all([node % each == 0 for each in span], axis=0)  # else some groups straddle two nodes
    usual = inside & np.less_equal(fitting.fsdp, WIDE)
    if usual.all() or not usual.any():
        return np.full(len(usual), True)
    return usual | (seconds[~usual].min() * (1 + question.margin) < seconds[usual].min())


def _one_of_each(fitting: Candidate, order: np.ndarray) -> list[int]:
    """Returns the first of every mesh, ZeRO stage and form of context, in order."""
    forms = np.unique(fitting.context_by, return_inverse=True)[1], fitting.ulysses, fitting.zero_context
    keys = np.stack([value[order] for value in (*fitting.sizes.values(), fitting.zero, *forms)], axis=1)
    first = np.sort(np.unique(keys, axis=0, return_index=True)[1])
    return order[first].tolist()


def _doubted(question: Question, fitting: Candidate, time: StepTime, needed: np.ndarray) -> dict[str, Ranked]:
    """Returns what would be first with each assumption as wrong as it may be.

    Weighed is what is fast today, and then, of all that fit, what a doubt may make as fast as that. What is first takes
    at most two margins more than the fastest: one that layouts inside of nodes have, and one for simplicity.
    """
    near, found = (1 + question.margin) ** 2, {}
    fast = pick(fitting, np.flatnonzero(time.total <= time.total.min() * near))
    for doubt in doubts(question.hardware, question.software):
        changed = replace(question, hardware=doubt.hardware, software=doubt.software)
        reached = changed.seconds(fast).total.min()
        may = np.flatnonzero(doubt.at_least(time) <= reached * near * (1 + ROUNDING))
        close = pick(fitting, may)
        order = _order(changed, close, changed.seconds(close).total, needed[may])
        found[doubt.what] = weigh(changed, at(close, int(order[0])))
    return found


def _fits_nowhere(question: Question, candidates: Candidate, needed: np.ndarray):
    """Returns the refusal: the leanest layout, and what would make something fit."""
    limit = question.limit(candidates)
    i = int(np.argmin(needed / limit))
    leanest = at(candidates, i)
    fix = f"a chip with {show_bytes(float(needed[i] / limit[i]) * question.room)}"
    for more in (question.devices * n for n in (2, 4, 8, 16)):
        try:
            wider = question.legal(more)
        except JaxparError:  # more than the model and the batch can use
            continue
        if (question.bytes(wider).total <= question.limit(wider)).any():
            fix = f"--devices {more}, or {fix}"
            break
    return refuse(
        f"{question.devices} devices with {show_bytes(question.room)} each, of which {question.spare:.0%} stays free: "
        f"none of {len(needed):,} layouts fits; the leanest needs {show_bytes(float(needed[i]))} ({describe(leanest)})",
        rule="parameters, gradients, optimizer state and what the backward pass keeps fit the devices' memory",
        fix=fix,
    )


def describe(candidate: Candidate) -> str:
    """Returns a layout in a line: `pipe 4 x fsdp 8 (ZeRO-3), 1f1b_phased, 8 microbatches of 2, remat full`."""
    words = " x ".join(f"{axis} {size}" for axis, size in candidate.sizes.items() if size > 1) or "one device"
    over = " over fsdp x context" * bool(candidate.zero_context)
    words += f" (ZeRO-{candidate.zero}{over})" * bool(candidate.shards > 1) + ", sequence" * bool(candidate.sequence)
    if candidate.context_by != "gather":
        both = f" x ulysses {candidate.ulysses}" * (candidate.context_by == "ring" and candidate.ulysses > 1)
        words += f", context by {candidate.context_by}{both}"
    if candidate.pipe > 1:
        words += f", {candidate.schedule}" + f" of {candidate.chunks} chunks" * (candidate.chunks > 1)
        words += ", head spread" * (candidate.head == "spread")
    words += f", {candidate.microbatches} microbatches of {candidate.microbatch}" if candidate.microbatches > 1 else ""
    return words + f", remat {candidate.remat}" * (candidate.remat != "none")
