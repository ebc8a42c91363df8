"""A plan of replicated stages as a tree of segments, and the time and memory of each stage.

    3(4)-1(2-1-1)    the first stage on 3 servers with 4 GPUs each; three more stages on 2, 1 and 1 GPUs of one server

Once all stages are busy, the time of a minibatch is that of the slowest stage, or of the slowest link between stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from jaxpar.partition.chain import Chain
from jaxpar.partition.objective import Level, Objective, devices, sends


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers, replicated on several parts of a level of the network (such as servers, or GPUs of a server).

    Attributes:
      first: Index of the first layer.
      stop: Index after the last layer.
      replicas: Number of parts, such as servers; each holds a replica of the layers.
      inner: The segments into which each part divides the layers; () if a part is a single device.
    """

    first: int
    stop: int
    replicas: int
    inner: tuple["Segment", ...] = ()

    @property
    def leaves(self) -> int:
        """The number of stages in the segment."""
        return sum(part.leaves for part in self.inner) or 1

    def __str__(self) -> str:
        return f"{self.replicas}({plan_name(self.inner)})" if self.inner else str(self.replicas)


def plan_name(parts: Sequence[Segment]) -> str:
    """Returns the replicas of each stage: 15-1, or 3(4)-1(2-1-1) on two levels."""
    return "-".join(map(str, parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionStage:
    """Consecutive layers, and the devices that run them. All seconds are modelled, per minibatch.

    Attributes:
      layers: Names of the layers.
      first: Index of the first layer.
      replicas: Number of devices that run the stage, each on other minibatches.
      computes: Seconds of forward and backward, divided by the number of replicas.
      all_reduces: Seconds of the all-reduces of the weights, at each level, innermost first.
      sends: Seconds to send activations to the next stage and gradients back; 0 for the last stage.
      seconds: Seconds of computing and all-reduces, partly overlapped, without sending.
      depth: Forwards that a replica runs before its first backward, as warm-up.
      versions: Number of versions of the weights that a replica stashes, including the newest: depth + 1.
      parameters: Bytes of the weights.
      activations: Bytes of the layers' outputs for one minibatch.
    """

    layers: tuple[str, ...]
    first: int
    replicas: int
    computes: float
    all_reduces: tuple[float, ...]
    sends: float
    seconds: float
    depth: int
    versions: int
    parameters: float
    activations: float

    @property
    def memory(self) -> float:
        """Bytes of a device: weights and activations of each version, without gradients and optimizer state."""
        return self.versions * (self.parameters + self.activations)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by cause, except for sending."""
        suffixes = [
            "" if len(self.all_reduces) == 1 else f" over level {level}"
            for level in range(1, len(self.all_reduces) + 1)
        ]
        return {"computes": self.computes} | {
            f"all-reduces its weights{suffix}": seconds
            for suffix, seconds in zip(suffixes, self.all_reduces, strict=True)
        }

    @property
    def total_seconds(self) -> float:
        """Seconds of a minibatch: the maximum of the stage's work and its sending, which overlap."""
        return max(self.seconds, self.sends)

    @property
    def limit(self) -> str:
        """Name of the stage's bottleneck: "sends", or a key of `terms`."""
        return "sends" if self.sends > self.seconds else max(self.terms, key=lambda term: self.terms[term])


def price_stages(
    parts: Sequence[Segment], chain: Chain, tree: Sequence[Level], objective: Objective
) -> tuple[PartitionStage, ...]:
    """Computes the stages of a plan, in order, with their seconds and bytes."""
    total, devices_before, stages = devices(tree), 0, []
    for part, shares, send_seconds in _stages_with_costs(parts, len(tree), (), (chain, tree, objective)):
        layers, replicas = slice(part.first, part.stop), prod(count for count, _ in shares)
        versions = ceil((total - devices_before) / replicas)
        computes = sum(chain.seconds[layers])
        stages.append(
            PartitionStage(
                layers=chain.names[layers],
                first=part.first,
                replicas=replicas,
                computes=computes / replicas,
                all_reduces=tuple(
                    seconds / prod(m for m, _ in shares[level:]) for level, (_, seconds) in enumerate(shares)
                ),
                sends=send_seconds,
                seconds=_per_minibatch(computes, shares, objective),
                depth=versions - 1,
                versions=versions,
                parameters=sum(chain.parameters[layers]),
                activations=sum(chain.activations[layers]),
            )
        )
        devices_before += replicas
    return tuple(stages)


Shares = tuple[tuple[int, float], ...]  # (replicas, all-reduce seconds) of a level and of all levels above it


def _stages_with_costs(
    parts: Sequence[Segment], level: int, outer: Shares, given: tuple[Chain, Sequence[Level], Objective]
) -> Iterator[tuple[Segment, Shares, float]]:
    """Yields each stage with its segments from the outermost level on, and its seconds of sending."""
    chain, tree, objective = given
    for part in parts:
        weights = sum(chain.parameters[part.first : part.stop])
        shares = (
            (part.replicas, float(objective.all_reduce_seconds(weights, part.replicas, tree[level - 1].link))),
            *outer,
        )
        leaves = list(_stages_with_costs(part.inner, level - 1, shares, given)) if part.inner else [(part, shares, 0.0)]
        yield from leaves[:-1]
        cost = float(sends(chain.crossing[part.stop - 1], tree[level - 1].link)) if part is not parts[-1] else 0.0
        last, last_shares, _ = leaves[-1]
        yield last, last_shares, _per_minibatch(cost, outer, objective) if cost else 0.0


def _per_minibatch(seconds: float, shares: Shares, objective: Objective) -> float:
    """Converts the seconds of a minibatch on one device to those on replicas at each level, with all-reduces."""
    for replicas, agree in shares:
        seconds = float(objective.overlapped_seconds(seconds, agree)) / replicas
    return seconds
