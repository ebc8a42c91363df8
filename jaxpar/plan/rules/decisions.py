"""The published decision table for layouts, as data: where the model fits, which links there are, what follows.

    one node        fits a device        DDP, or ZeRO
                    does not             NVLink: pipeline, ZeRO or tensor, on a par; else the pipeline
                    largest layer not    tensor, or ZeRO
    several nodes   fast links           ZeRO, or pipeline + tensor + data
                    slow, a node holds   ZeRO inside nodes, replicas between
                    slow, it does not    data + pipeline + tensor + ZeRO-1

Source: Hugging Face transformers, "Efficient Training on Multiple GPUs" (perf_train_gpu_many), "Scalability strategy";
slow links and a model that a node does hold are left out there, so that row is of Stas Bekman's "Machine Learning
Engineering", "Model Parallelism" (stas00/ml-engineering), which has the same table. Neither says what is fast: `FAST`.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.units import show_bytes

FAST = {"one": 100e9, "several": 10e9}  # bytes/s of a device: below NVLink of any generation, of a 100 Gb/s NIC each
Sizes = tuple[float, float]
ONE, ANY, MANY = (1, 1), (1, inf), (2, inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The questions of the table about a model and its machines.

    Attributes:
      nodes: "one" or "several".
      model: What holds it in training, one row at a time: "device", "node" (its devices, with ZeRO-3), "more" than a
        node; or "layer": a device does not even hold its largest layer.
      links: "fast" or "slow": those inside the one node, or those between several, by `FAST`.
      facts: The numbers that this follows from, as a person reads them.
    """

    nodes: str
    model: str
    links: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layouts:
    """A kind of layout: lowest and highest size of each axis; 1 of those that the table does not know.

    Attributes:
      name: What the table calls it.
      pipe: Of stages, as all that follow.
      data: Of replicas.
      fsdp: Of devices that share the state.
      tensor: Of devices that share a matrix: those of one node at most ("TP size <= GPUs per node").
      zero: ZeRO stages, where fsdp is more than 1.
      local: Whether fsdp stays in a node, too.
    """

    name: str
    pipe: Sizes = ONE
    data: Sizes = ANY
    fsdp: Sizes = ONE
    tensor: Sizes = ONE
    zero: tuple[int, ...] = (0, 1, 2, 3)
    local: bool = False

    def among(self, candidates: Candidate, per_node: int) -> Any:
        """Returns which of many candidates are of this kind."""
        tensor = (self.tensor[0], min(self.tensor[1], per_node))
        fsdp = (self.fsdp[0], min(self.fsdp[1], per_node)) if self.local else self.fsdp
        found = np.isin(candidates.zero, self.zero)
        named = {"pipe": self.pipe, "data": self.data, "fsdp": fsdp, "tensor": tensor}
        for axis, size in candidates.sizes.items():
            least, most = named.get(axis, ONE)
            found = found & (size >= least) & (size <= most)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A row of the table.

    Attributes:
      nodes: Situations it is for, as all of the next two.
      model: What of them.
      links: What of them.
      advice: What it says, in its own order.
      layouts: What that means, in the same order.
    """

    nodes: tuple[str, ...] = ("one", "several")
    model: tuple[str, ...] = ("device", "node", "more", "layer")
    links: tuple[str, ...] = ("fast", "slow")
    advice: str
    layouts: tuple[Layouts, ...]

    def fires(self, situation: Situation) -> bool:
        """Returns whether it is for this situation."""
        return all(getattr(situation, key) in getattr(self, key) for key in ("nodes", "model", "links"))


DDP = Layouts(name="DDP")
ZERO = Layouts(name="ZeRO", data=ONE, fsdp=MANY)
PP = Layouts(name="PP", pipe=MANY)
TP = Layouts(name="TP", tensor=MANY)
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
        advice="TP, for PP alone cannot hold the layer; or ZeRO, with all that saves memory on one device",
    ),
    Rule(
        nodes=("several",), links=("fast",),
        advice="ZeRO, which leaves the model as it is; or PP + TP + DP, which sends less",
        layouts=(ZERO, Layouts(name="PP + TP + DP", pipe=MANY, data=MANY, tensor=MANY)),
    ),
    Rule(
        nodes=("several",), model=("device", "node"), links=("slow",),
        advice="ZeRO over the links inside a node, DDP over those between nodes",
        layouts=(Layouts(name="ZeRO with replicas", data=MANY, fsdp=MANY, local=True),),
    ),
    Rule(
        nodes=("several",), model=("more", "layer"), links=("slow",), advice="DP + PP + TP + ZeRO-1",
        layouts=(Layouts(name="DP + PP + TP + ZeRO-1", pipe=MANY, fsdp=MANY, tensor=MANY, zero=(1,)),),
    ),
)  # fmt: skip


def situated(*, nodes: int, needs: dict[str, float], room: float, bandwidth: float) -> Situation:
    """Returns the situation that these numbers make.

    Args:
      nodes: How many.
      needs: Bytes of a device: "device", for all of the model; "node", if the devices of a node share it; "layer", for
        its largest layer alone.
      room: Bytes of a device.
      bandwidth: Of the links that matter, bytes per second and device.
    """
    few = "several" if nodes > 1 else "one"
    fits = [what for what in ("layer", "device", "node") if needs[what] <= room]
    model = "layer" if "layer" not in fits else "device" if "device" in fits else "node" if "node" in fits else "more"
    links = "fast" if bandwidth >= FAST[few] else "slow"
    where = "between nodes" if nodes > 1 else "inside it"
    limit = f"from {FAST[few] / 1e9:g} on they are fast"
    return Situation(
        nodes=few,
        model=model,
        links=links,
        facts=(
            f"{nodes} node{'s' * (nodes > 1)}, links {where} {bandwidth / 1e9:.3g} GB/s per device: {links} ({limit})",
            f"of a device, {show_bytes(room)}, training needs {show_bytes(needs['device'])} for all of the model, "
            f"{show_bytes(needs['node'])} where a node shares it, {show_bytes(needs['layer'])} for its largest layer",
        ),
    )
