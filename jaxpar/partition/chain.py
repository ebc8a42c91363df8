"""Layer profiles, and their conversion to a chain.

A chain is layers in an executable order, and the bytes that cross each cut between them:

    conv ──► relu ──► pool ──► add          cut after relu: relu's output, and conv's, which add needs
      └──────────────────────►

PipeDream's authors enumerate antichains for graphs, which takes 1,495 states for GNMT-16; a chain takes 96.
Every cut of the chain is a cut of the graph, but not vice versa.

Profiles are read and written in PipeDream's format:

    node10 -- Dropout(p=0.2) -- forward_compute_time=0.124, backward_compute_time=0.159, activation_size=13107200.0, ...
    <tab>node9 -- node10

A file has one line per layer, then one line per edge, which begins with a tab. If a layer has several outputs,
activation_size is a list such as [13107200.0; 524288.0].

Format: github.com/msr-fiddle/pipedream; the profiler of Narayanan et al. (2019), arXiv:1806.03377.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from jaxpar.errors import refuse

NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
COSTS = re.compile(
    f"forward_compute_time=({NUMBER}), backward_compute_time=({NUMBER}), "
    rf"activation_size=({NUMBER}|\[{NUMBER}(?:; {NUMBER})*\]), parameter_size=({NUMBER})"
)
LINE = "node1 -- ReLU() -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=4.0, parameter_size=0.0"


@dataclass(frozen=True)
class Node:
    """A layer.

    Attributes:
      name: Its name in edges.
      layer: The layer, as the profiler printed it.
      forward: Milliseconds of the forward of a minibatch; 0 for inputs, for which a file has the time to load data.
      backward: Milliseconds of the backward. The profiler adds some layers' time to a neighbour: only sums are
        reliable.
      activations: Bytes of all outputs, for a minibatch.
      parameters: Bytes of the parameters.
    """

    name: str
    layer: str
    forward: float
    backward: float
    activations: float
    parameters: float

    @property
    def storage(self) -> float:
        """Bytes of a layer in training: weights, outputs, and a gradient of the same size for each."""
        return 2 * (self.parameters + self.activations)


@dataclass(frozen=True)
class Profile:
    """The profile of a model.

    Attributes:
      nodes: The layers in topological order; otherwise in the order of the file.
      edges: Pairs (from, to) of names of layers.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]


def load(path: str | Path) -> Profile:
    """Reads the profile in a file.

    Raises:
      JaxparError: If a line cannot be parsed, or the layers' dependencies have a cycle.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"profile {path}: {error}", rule="a profile is a text file", fix="another path") from error
    nodes: dict[str, Node] = {}
    edges = []
    for number, line in enumerate(lines, 1):
        pieces = line.strip().split(" -- ")
        location = f"{path}, line {number}: {line.strip()[:60]!r}"
        if line.startswith("\t"):
            if len(pieces) != 2 or not nodes.keys() >= set(pieces):
                raise refuse(location, rule="an edge joins two nodes of earlier lines", fix="<tab>node1 -- node2")
            edges.append((pieces[0], pieces[1]))
        elif line.strip():
            costs = COSTS.fullmatch(pieces[-1])
            if len(pieces) != 3 or not costs or pieces[0] in nodes:
                raise refuse(
                    location, rule="a line is a node, its layer and its costs; a node has only one line", fix=LINE
                )
            nodes[pieces[0]] = _node(pieces[0], pieces[1], costs)
    if not nodes:
        raise refuse(f"{path} has no node", rule="a profile has one line for each layer", fix=LINE)
    return Profile(tuple(nodes[name] for name in _in_order(list(nodes), edges, path)), tuple(edges))


def dumps(profile: Profile) -> str:
    """Formats a profile as text that `load` reads: times to a nanosecond, bytes exactly.

    Raises:
      JaxparError: If a layer's name contains the separator ` -- ` or a line break.
    """
    for node in profile.nodes:
        if " -- " in node.layer or not node.layer.isprintable() or node.layer != node.layer.strip():
            raise refuse(f"layer {node.layer!r}", rule="a layer's name is one line without ` -- `", fix="Block 0")
    lines = [
        f"{node.name} -- {node.layer} -- forward_compute_time={node.forward:.6f}, "
        f"backward_compute_time={node.backward:.6f}, activation_size={node.activations:.1f}, "
        f"parameter_size={node.parameters:.1f}"
        for node in profile.nodes
    ]
    return "\n".join([*lines, *(f"\t{source} -- {target}" for source, target in profile.edges)]) + "\n"


def _node(name: str, layer: str, costs: re.Match) -> Node:
    forward, backward, outputs, parameters = costs.groups()
    computes = not layer.startswith("Input")
    activations = sum(float(size) for size in outputs.strip("[]").split("; "))
    return Node(name, layer, float(forward) * computes, float(backward) * computes, activations, float(parameters))


def _in_order(names: list[str], edges: Sequence[tuple[str, str]], path: str | Path) -> list[str]:
    """Returns the names in topological order; ties are resolved by the order in the file."""
    needs = {name: {source for source, target in edges if target == name} for name in names}
    ordered: list[str] = []
    while needs:
        next_name = next((name for name, source in needs.items() if not source & needs.keys()), None)
        if next_name is None:
            raise refuse(
                f"{path}: {', '.join(needs)}"[:200],
                rule="the graph of layers has no cycle",
                fix="one edge of the circle less",
            )
        ordered.append(next_name)
        del needs[next_name]
    return ordered


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
