"""Layer profiles as PipeDream writes them, and the cut of a chain of layers into parts that cost the same.

    node10 -- Dropout(p=0.2) -- forward_compute_time=0.124, backward_compute_time=0.159, activation_size=13107200.0, ...
    <tab>node9 -- node10

One line for each layer, then one line, which begins with a tab, for each edge. Where a layer has several outputs,
activation_size is a list such as [13107200.0; 524288.0].

Format: github.com/msr-fiddle/pipedream; the profiler of Narayanan et al. (2019), arXiv:1806.03377.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
      forward: Milliseconds for a minibatch; 0 for inputs, where the profiler wrote how long data took to load.
      backward: The same. Some layers' time is booked with a neighbour: trust sums.
      activations: Bytes of all outputs, for a minibatch.
      parameters: Bytes.
    """

    name: str
    layer: str
    forward: float
    backward: float
    activations: float
    parameters: float

    @property
    def storage(self) -> float:
        """Bytes of a layer in training, w + f + grad w + grad o: each gradient is as large as what it is the one of."""
        return 2 * (self.parameters + self.activations)


@dataclass(frozen=True)
class Profile:
    """A model.

    Attributes:
      nodes: Its layers, each after all that it needs, otherwise as they are in the file.
      edges: (from, to), by name.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]


def load(path: str | Path) -> Profile:
    """Returns the profile in a file.

    Raises:
      JaxparError: With the line that cannot be read, or if layers need each other in a circle.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"profile {path}: {error}", rule="a profile is a text file", fix="another path") from error
    nodes: dict[str, Node] = {}
    edges = []
    for number, line in enumerate(lines, 1):
        pieces = line.strip().split(" -- ")
        where = f"{path}, line {number}: {line.strip()[:60]!r}"
        if line.startswith("\t"):
            if len(pieces) != 2 or not nodes.keys() >= set(pieces):
                raise refuse(where, rule="an edge joins two nodes of earlier lines", fix="<tab>node1 -- node2")
            edges.append((pieces[0], pieces[1]))
        elif line.strip():
            costs = COSTS.fullmatch(pieces[-1])
            if len(pieces) != 3 or not costs or pieces[0] in nodes:
                raise refuse(where, rule="a line is a node, its layer and its costs; each node has one", fix=LINE)
            nodes[pieces[0]] = _node(pieces[0], pieces[1], costs)
    if not nodes:
        raise refuse(f"{path} has no node", rule="a profile has one line for each layer", fix=LINE)
    return Profile(tuple(nodes[name] for name in _in_order(list(nodes), edges, path)), tuple(edges))


def dumps(profile: Profile) -> str:
    """Returns a profile as text, which `load` reads back: times to a nanosecond, bytes exactly.

    Raises:
      JaxparError: If a layer's words would end its column.
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
    return "\n".join([*lines, *(f"\t{before} -- {after}" for before, after in profile.edges)]) + "\n"


def _node(name: str, layer: str, costs: re.Match) -> Node:
    forward, backward, outputs, parameters = costs.groups()
    computes = not layer.startswith("Input")
    activations = sum(float(size) for size in outputs.strip("[]").split("; "))
    return Node(name, layer, float(forward) * computes, float(backward) * computes, activations, float(parameters))


def _in_order(names: list[str], edges: Sequence[tuple[str, str]], path: str | Path) -> list[str]:
    """Returns the names so that each comes after all that it needs, the first ready one first."""
    needs = {name: {before for before, after in edges if after == name} for name in names}
    ordered: list[str] = []
    while needs:
        ready = next((name for name, before in needs.items() if not before & needs.keys()), None)
        if ready is None:
            raise refuse(
                f"{path}: {', '.join(needs)}"[:200],
                rule="the graph of layers has no cycle",
                fix="one edge of the circle less",
            )
        ordered.append(ready)
        del needs[ready]
    return ordered
