"""The published decision table for layouts, as data, and its comparison with the cost model.

    one node        model fits a device       DDP, or ZeRO
                    it does not               NVLink: pipeline, ZeRO or tensor, on a par; otherwise the pipeline
                    nor its largest layer     tensor, or ZeRO
    several nodes   fast links                ZeRO, or pipeline + tensor + data
                    slow, fits a node         ZeRO inside nodes, replicas between
                    slow, does not            data + pipeline + tensor + ZeRO-1

    model, hardware ──► search ──► plan ──► advise: the matching row, and the best layouts that it names

Source: Hugging Face transformers, "Efficient Training on Multiple GPUs" (perf_train_gpu_many), "Scalability strategy".
The row for slow links and a model that fits a node is missing there, and comes from Stas Bekman's "Machine Learning
Engineering", "Model Parallelism" (stas00/ml-engineering), which has the same table. `FAST` is our definition of fast.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.search import Plan, Question, Ranked, describe, predict
from jaxpar.units import show_bytes, show_seconds

FAST = {"one": 100e9, "several": 10e9}  # bytes/s of a device: slower than any NVLink; about a 100 Gb/s NIC per device
Sizes = tuple[float, float]
ONE, ANY, MANY = (1, 1), (1, inf), (2, inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A model and its machines, as the rows of the published table classify them.

    Attributes:
      nodes: "one" or "several".
      model: The smallest unit whose memory suffices to train the model with one example: "device", "node" (with
        ZeRO-3), "more" than a node; or "layer", if a device cannot hold even the largest layer.
      links: "fast" or "slow" by `FAST`: the links inside the one node, or between several.
      facts: The numbers behind the situation, as text.
    """

    nodes: str
    model: str
    links: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutKind:
    """A kind of layout: lowest and highest size of each axis. Axes that the table does not mention have size 1.

    Attributes:
      name: Name in the table.
      pipe: Lowest and highest number of stages.
      data: Lowest and highest number of replicas.
      fsdp: Lowest and highest number of devices that share the state.
      tensor: Lowest and highest number of devices that share a matrix, at most a node ("TP size <= GPUs per node").
      zero: ZeRO stages, if fsdp is above 1.
      local: Whether fsdp must stay in a node.
    """

    name: str
    pipe: Sizes = ONE
    data: Sizes = ANY
    fsdp: Sizes = ONE
    tensor: Sizes = ONE
    zero: tuple[int, ...] = (0, 1, 2, 3)
    local: bool = False

    def mask(self, candidates: Candidate, per_node: int) -> Any:
        """Returns a mask of the candidates of this kind."""
        tensor = (self.tensor[0], min(self.tensor[1], per_node))
        fsdp = (self.fsdp[0], min(self.fsdp[1], per_node)) if self.local else self.fsdp
        mask = np.isin(candidates.zero, self.zero)
        bounds = {"pipe": self.pipe, "data": self.data, "fsdp": fsdp, "tensor": tensor}
        for axis, size in candidates.sizes.items():
            low, high = bounds.get(axis, ONE)
            mask = mask & (size >= low) & (size <= high)
        return mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A row of the table.

    Attributes:
      nodes: Values of `Situation.nodes` for which it holds.
      model: Values of `Situation.model`.
      links: Values of `Situation.links`.
      advice: The advice as text.
      layouts: The kinds of layouts that it names, in the same order.
    """

    nodes: tuple[str, ...] = ("one", "several")
    model: tuple[str, ...] = ("device", "node", "more", "layer")
    links: tuple[str, ...] = ("fast", "slow")
    advice: str
    layouts: tuple[LayoutKind, ...]

    def fires(self, situation: Situation) -> bool:
        """Whether the rule holds for a situation."""
        return all(getattr(situation, key) in getattr(self, key) for key in ("nodes", "model", "links"))


DDP = LayoutKind(name="DDP")
ZERO = LayoutKind(name="ZeRO", data=ONE, fsdp=MANY)
PP = LayoutKind(name="PP", pipe=MANY)
TP = LayoutKind(name="TP", tensor=MANY)
RULES = (
    Rule(nodes=("one",), model=("device",), advice="DDP, or ZeRO, which may or may not be faster", layouts=(DDP, ZERO)),
    Rule(
        nodes=("one",), model=("node", "more"), links=("fast",), layouts=(PP, ZERO, TP),
        advice="PP, ZeRO or TP: over NVLink or NVSwitch they are on a par",
    ),
    Rule(
        nodes=("one",), model=("node", "more"), links=("slow",), layouts=(PP,),
        advice="PP: without NVLink it is faster than ZeRO or TP",
    ),
    Rule(
        nodes=("one",), model=("layer",), layouts=(TP, ZERO),
        advice="TP, because with PP alone the layer does not fit; or ZeRO, with all that saves memory on one device",
    ),
    Rule(
        nodes=("several",), links=("fast",),
        advice="ZeRO, which leaves the model as it is; or PP + TP + DP, which sends less",
        layouts=(ZERO, LayoutKind(name="PP + TP + DP", pipe=MANY, data=MANY, tensor=MANY)),
    ),
    Rule(
        nodes=("several",), model=("device", "node"), links=("slow",),
        advice="ZeRO over the links inside a node, DDP over those between nodes",
        layouts=(LayoutKind(name="ZeRO with replicas", data=MANY, fsdp=MANY, local=True),),
    ),
    Rule(
        nodes=("several",), model=("more", "layer"), links=("slow",), advice="DP + PP + TP + ZeRO-1",
        layouts=(LayoutKind(name="DP + PP + TP + ZeRO-1", pipe=MANY, fsdp=MANY, tensor=MANY, zero=(1,)),),
    ),
)  # fmt: skip


def make_situation(*, nodes: int, needs: dict[str, float], room: float, bandwidth: float) -> Situation:
    """Returns the situation for these numbers.

    Args:
      nodes: Number of nodes.
      needs: Bytes of a device: "device", for the whole model; "node", if the devices of a node share it; "layer", for
        its largest layer alone.
      room: Bytes that a device has.
      bandwidth: Bytes per second and device of the links between nodes, or inside a single one.
    """
    node_count = "several" if nodes > 1 else "one"
    fits = [unit for unit in ("layer", "device", "node") if needs[unit] <= room]
    model = "layer" if "layer" not in fits else "device" if "device" in fits else "node" if "node" in fits else "more"
    links = "fast" if bandwidth >= FAST[node_count] else "slow"
    place = "between nodes" if nodes > 1 else "inside it"
    limit = f"fast means at least {FAST[node_count] / 1e9:g} GB/s"
    return Situation(
        nodes=node_count,
        model=model,
        links=links,
        facts=(
            f"{nodes} node{'s' * (nodes > 1)}, links {place} {bandwidth / 1e9:.3g} GB/s per device: {links} ({limit})",
            f"of a device's {show_bytes(room)}, training needs {show_bytes(needs['device'])} for the whole model, "
            f"{show_bytes(needs['node'])} where a node shares it, {show_bytes(needs['layer'])} for its largest layer",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class AdviceOption:
    """A kind of layout that the rule names.

    Attributes:
      layouts: The kind.
      best: The fastest of its layouts that fit; None if none fits.
      why: Reason why none fits; "" otherwise.
    """

    layouts: LayoutKind
    best: Ranked | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice of the table, compared with a plan.

    Attributes:
      plan: The cost model's plan.
      situation: The model and its machines in terms of the table.
      rule: The row of the table for the situation.
      options: The kinds of layouts that the row recommends, in the table's order.
    """

    plan: Plan
    situation: Situation
    rule: Rule
    options: tuple[AdviceOption, ...]

    @property
    def recommended(self) -> Ranked | None:
        """The fastest layout that the rule names; None if none fits."""
        fitting = [option.best for option in self.options if option.best is not None]
        return min(fitting, key=lambda ranked: ranked.time.total, default=None)

    @property
    def gap(self) -> float:
        """The share by which `recommended` is slower than the plan's first; may be below 0 by up to the margin."""
        return self.recommended.time.total / self.plan.best[0].time.total - 1 if self.recommended else np.inf

    @property
    def agrees(self) -> bool:
        """Whether the table names the plan's first layout, or one as fast within the search's margin."""
        return self.gap <= self.plan.question.margin

    @property
    def verdict(self) -> str:
        """Compares the rule's layout with the cost model's, as text: the difference in step time, and its causes."""
        first, advised = self.plan.best[0], self.recommended
        best = f"{describe(first.candidate)}, {show_seconds(first.time.total)}"
        if advised is None:
            return f"they differ: nothing that the table names fits; the cost model's first does: {best}"
        if _mesh(advised) == _mesh(first):
            return f"they agree: the cost model's first is {best}"
        floor = 0.002 * first.time.total
        causes = [f", {cause} +{show_seconds(extra)}" for cause, extra in advised.slower_causes(first) if extra > floor]
        return (
            f"{'they are as good' if self.agrees else 'they differ'}: the cost model's first is {best}; "
            f"the table's best takes {round(self.gap, 3) + 0.0:+.1%}{''.join(causes[:3])}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the advice for JSON."""
        situation = {key: getattr(self.situation, key) for key in ("nodes", "model", "links", "facts")}
        options = [
            {"name": option.layouts.name, "best": option.best and option.best.to_dict(), "why": option.why}
            for option in self.options
        ]
        return {
            "situation": situation,
            "rule": self.rule.advice,
            "options": options,
            "recommended": self.recommended and self.recommended.to_dict(),
            "first": self.plan.best[0].to_dict(),
            "gap": self.gap if self.recommended else None,
            "agrees": self.agrees,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        lines = [f"The published decision table: {self.rule.advice}", *(f"  {fact}" for fact in self.situation.facts)]
        width = max(len(option.layouts.name) for option in self.options)
        for option in self.options:
            text = option.why
            if option.best is not None:
                text = f"{describe(option.best.candidate)}: {show_seconds(option.best.time.total)}"
                text += f", {show_bytes(option.best.memory.total)}"
            lines.append(f"  {option.layouts.name:<{width}}  {text}")
        return "\n".join([*lines, f"  {self.verdict}"])


def advise(plan: Plan) -> Advice:
    """Applies the published decision table to the question of a plan.

    The cost model chooses sizes, schedule and remat, which the table leaves open. All numbers are modelled.

    Args:
      plan: The result of `search`.
    """
    situation = find_situation(plan.question)
    rule = next(rule for rule in RULES if rule.fires(situation))
    options = tuple(_options(plan.question, rule))
    return Advice(plan=plan, situation=situation, rule=rule, options=options)


def find_situation(question: Question) -> Situation:
    """Returns the situation of a question in terms of the table.

    A model fits if its state and the residuals of one example fit under the remat policy that needs the least memory:
    the published page tries all options of a single device before it adds devices.
    """
    per_node = min(question.hardware.per_node, question.devices)
    remat = np.array(question.choices.remats)
    needs = {
        holder: float(np.min(question.bytes(Candidate(fsdp=n, zero=3 * (n > 1), remat=remat)).total))
        for holder, n in (("device", 1), ("node", per_node))
    }
    needs["layer"] = question.costs.largest_layer
    nodes = -(-question.devices // question.hardware.per_node)
    link = question.hardware.between if nodes > 1 else question.hardware.inside
    return make_situation(nodes=nodes, needs=needs, room=question.limit(Candidate()), bandwidth=link.bandwidth)


def _options(question: Question, rule: Rule) -> Iterator[AdviceOption]:
    candidates = question.legal()
    sizes, seconds = question.bytes(candidates).total, question.seconds(candidates).total
    for layouts in rule.layouts:
        mask = layouts.mask(candidates, question.hardware.per_node)
        fits = mask & (sizes <= question.limit(candidates))
        if fits.any():
            fastest = select_one(candidates, int(np.argmin(np.where(fits, seconds, np.inf))))
            yield AdviceOption(layouts=layouts, best=predict(question, fastest))
        elif mask.any():
            i = int(np.argmin(np.where(mask, sizes, np.inf)))
            reason = f"the leanest, {describe(select_one(candidates, i))}, needs {show_bytes(float(sizes[i]))}"
            yield AdviceOption(layouts=layouts, best=None, why=f"does not fit: {reason}")
        else:
            yield AdviceOption(
                layouts=layouts, best=None, why="is not possible with these devices, heads, layers and rows"
            )


def _mesh(ranked: Ranked) -> tuple:
    return (*ranked.candidate.sizes.values(), ranked.candidate.zero)
