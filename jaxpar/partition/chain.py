"""Converts a profile to a chain: layers in an executable order, and the bytes that cross each cut between them.

    conv ──► relu ──► pool ──► add          cut after relu: relu's output, and conv's, which add needs
      └──────────────────────►

PipeDream's authors enumerate antichains for graphs, which takes 1,495 states for GNMT-16; a chain takes 96.
Every cut of the chain is a cut of the graph, but not vice versa.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from jaxpar.errors import refuse
from jaxpar.partition.profile import Profile


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers in sequence, for one minibatch on one device.

    Attributes:
      names: Names of the layers.
      seconds: Seconds of forward and backward of each layer. Shape [layers], as for the next three.
      parameters: Bytes of each layer's parameters.
      activations: Bytes of each layer's outputs, which are saved for the backward.
      crossing: Bytes of the outputs of a layer and earlier layers that later layers need; 0 for the last layer.

    Raises:
      JaxparError: If there is no layer, a number is missing, negative or not finite, or all times are 0.
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    parameters: tuple[float, ...]
    activations: tuple[float, ...]
    crossing: tuple[float, ...]

    def __post_init__(self):
        if not self.names:
            raise refuse("a profile without layers", rule="a model has at least one layer", fix="another profile")
        for key in ("seconds", "parameters", "activations", "crossing"):
            numbers = getattr(self, key)
            faults = [f"{key} = {number!r}" for number in numbers if not (number >= 0 and isfinite(number))]
            if len(numbers) != len(self.names):
                faults = [f"{len(numbers)} {key} for {len(self.names)} layers"]
            if faults:
                rule = "each layer has its seconds, parameters, activations and crossing bytes, 0 or more"
                raise refuse(faults[0], rule=rule, fix="measure that layer again")
        if not sum(self.seconds):
            raise refuse(
                "a profile whose layers take 0 s", rule="at least one layer takes time", fix="measure the layers again"
            )

    def scale_batch(self, factor: float) -> "Chain":
        """Scales the minibatch, assuming that times and activations are proportional to it.

        Raises:
          JaxparError: If the factor is not positive, or not finite.
        """
        if not (factor > 0 and isfinite(factor)):
            raise refuse(
                f"{factor!r} times the minibatch", rule="a factor is above 0, and finite", fix="0.5 for half of it"
            )
        seconds, activations, crossing = (
            tuple(factor * number for number in numbers) for numbers in (self.seconds, self.activations, self.crossing)
        )
        return Chain(self.names, seconds, self.parameters, activations, crossing)


def linearise(profile: Profile) -> Chain:
    """Converts a profile to a chain of layers in the profile's order.

    Each output that layers after a cut read crosses the cut once.

    Raises:
      JaxparError: If the profile is empty, or an edge points to an earlier layer.
    """
    nodes, index_of = profile.nodes, {node.name: index for index, node in enumerate(profile.nodes)}
    last_use = list(range(len(nodes)))  # the last layer that needs each output
    for source, target in profile.edges:
        if source not in index_of or target not in index_of or index_of[source] >= index_of[target]:
            raise refuse(
                f"edge {source} -- {target}", rule="each layer stands after all that it needs", fix="sort the layers"
            )
        last_use[index_of[source]] = max(last_use[index_of[source]], index_of[target])
    return Chain(
        tuple(node.name for node in nodes),
        tuple((node.forward + node.backward) / 1e3 for node in nodes),
        tuple(node.parameters for node in nodes),
        tuple(node.activations for node in nodes),
        _crossing([node.activations for node in nodes], last_use),
    )


def _crossing(sizes: Sequence[float], last: Sequence[int]) -> tuple[float, ...]:
    """Returns the bytes that cross the cut after each layer; `last` has the index of the last reader of each output."""
    return tuple(
        float(sum(size for size, user in zip(sizes[: place + 1], last, strict=False) if user > place))
        for place in range(len(sizes))
    )
