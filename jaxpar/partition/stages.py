"""A plan of stages with replicas, as a tree of parts, and what each stage then takes and holds.

    3(4)-1(2-1-1)    3 servers whose 4 GPUs do the same, and 1 server in which 2 GPUs, 1 and 1 are three more stages

Time of a minibatch, once all stages are full: that of the slowest stage, or of the slowest link between two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from jaxpar.partition.chain import Chain
from jaxpar.partition.objective import Objective, sends
from jaxpar.partition.topology import Level, devices


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers on parts of a level that all do the same.

    Attributes:
      first: Index of the first layer.
      stop: Index after the last one.
      replicas: Parts of the level.
      inner: How each of these cuts the layers among its own parts; empty for single devices.
    """

    first: int
    stop: int
    replicas: int
    inner: tuple["Part", ...] = ()

    @property
    def leaves(self) -> int:
        """The stages in it."""
        return sum(part.leaves for part in self.inner) or 1

    def __str__(self) -> str:
        return f"{self.replicas}({name(self.inner)})" if self.inner else str(self.replicas)


def name(parts: Sequence[Part]) -> str:
    """Returns the replicas of each stage: 15-1, or 3(4)-1(2-1-1) on two levels."""
    return "-".join(map(str, parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Consecutive layers, and the devices that run them. All seconds are per minibatch, modelled.

    Attributes:
      layers: Names of its layers.
      first: Index of the first of them.
      replicas: Devices that run it, each on another minibatch.
      computes: Seconds of forward and backward, shared by the replicas.
      agrees: Seconds in which the weights of the parts it is in are made equal, at each level, innermost first.
      sends: Seconds to hand activations to the next stage and to get their gradients back; 0 for the last.
      seconds: What it takes, sending apart, as far as one hides behind the other.
      depth: Forwards that a replica runs before its first backward, as warm-up.
      versions: Weights that a replica stashes, the newest included: depth + 1.
      parameters: Bytes of its weights.
      activations: Bytes of its layers' outputs for one minibatch.
    """

    layers: tuple[str, ...]
    first: int
    replicas: int
    computes: float
    agrees: tuple[float, ...]
    sends: float
    seconds: float
    depth: int
    versions: int
    parameters: float
    activations: float

    @property
    def memory(self) -> float:
        """Bytes of a device: weights and activations of each version. Gradients and optimizer come on top."""
        return self.versions * (self.parameters + self.activations)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by cause, sending apart."""
        over = ["" if len(self.agrees) == 1 else f" over level {level}" for level in range(1, len(self.agrees) + 1)]
        return {"computes": self.computes} | {
            f"agrees on its weights{where}": seconds for where, seconds in zip(over, self.agrees, strict=True)
        }

    @property
    def takes(self) -> float:
        """Seconds until it is done with a minibatch and has handed it on: both go on at the same time."""
        return max(self.seconds, self.sends)

    @property
    def limit(self) -> str:
        """The part that limits it: sends, or a key of `terms`."""
        return "sends" if self.sends > self.seconds else max(self.terms, key=lambda term: self.terms[term])


def priced(parts: Sequence[Part], chain: Chain, tree: Sequence[Level], objective: Objective) -> tuple[Stage, ...]:
    """Returns the stages of a plan, in their order, with their costs."""
    total, before, stages = devices(tree), 0, []
    for part, shares, sent in _leaves(parts, len(tree), (), (chain, tree, objective)):
        layers, replicas = slice(part.first, part.stop), prod(many for many, _ in shares)
        versions = ceil((total - before) / replicas)
        computes = sum(chain.seconds[layers])
        stages.append(
            Stage(
                layers=chain.names[layers],
                first=part.first,
                replicas=replicas,
                computes=computes / replicas,
                agrees=tuple(agree / prod(m for m, _ in shares[level:]) for level, (_, agree) in enumerate(shares)),
                sends=sent,
                seconds=_folded(computes, shares, objective),
                depth=versions - 1,
                versions=versions,
                parameters=sum(chain.parameters[layers]),
                activations=sum(chain.activations[layers]),
            )
        )
        before += replicas
    return tuple(stages)


Shares = tuple[tuple[int, float], ...]  # replicas and seconds of agreeing, at a level and each above it


def _leaves(
    parts: Sequence[Part], level: int, outer: Shares, given: tuple[Chain, Sequence[Level], Objective]
) -> Iterator[tuple[Part, Shares, float]]:
    """Yields each stage with its shares and the seconds it sends."""
    chain, tree, objective = given
    for part in parts:
        weights = sum(chain.parameters[part.first : part.stop])
        shares = ((part.replicas, float(objective.agree(weights, part.replicas, tree[level - 1].link))), *outer)
        leaves = list(_leaves(part.inner, level - 1, shares, given)) if part.inner else [(part, shares, 0.0)]
        yield from leaves[:-1]
        sent = float(sends(chain.crossing[part.stop - 1], tree[level - 1].link)) if part is not parts[-1] else 0.0
        last, its_shares, _ = leaves[-1]
        yield last, its_shares, _folded(sent, outer, objective) if sent else 0.0


def _folded(seconds: float, shares: Shares, objective: Objective) -> float:
    """Returns the seconds per minibatch of what each of the replicas does for its own one."""
    for replicas, agree in shares:
        seconds = float(objective.together(seconds, agree)) / replicas
    return seconds
