"""Seconds of one collective on two levels of links: an NVLink domain inside each node, NICs between nodes.

    node 0   0═1═2═3 ┐
                     ├ one NIC of each member: k members of a node send k times as fast as one
    node 1   4═5═6═7 ┘

Two ways over several nodes, and the cheaper is taken. `flat`: one ring node by node; where it
leaves a node, what travels is spread over the NICs of all members there. `hierarchical`: every
member first works inside its node, then with the members of its own index elsewhere on a k-th of
the array, then inside again. All modelled; `replay` plays each and takes as long.

Source: compare NCCL's rings over several rails, and Jia et al. (2018), arXiv:1807.11205.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpar.errors import nearest, refuse
from jaxpar.exchange import cost as collectives
from jaxpar.exchange.cost import CHUNKS, Cost, check
from jaxpar.mesh.links import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a group's members on nodes.

    Attributes:
      inside: The link of one member to the others of its node.
      between: The link of one member to other nodes: its NIC, or its share of the node's.
      per_node: Members of the group in each node.
      nodes: Nodes that have members.
    """

    inside: Link
    between: Link
    per_node: int
    nodes: int = 1

    def __post_init__(self):
        for key in ("per_node", "nodes"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise refuse(f"{key}={value!r} of a group", rule="a whole number, at least 1", fix=f"{key}=1")

    @property
    def group(self) -> int:
        """Members in all."""
        return self.per_node * self.nodes

    @property
    def only(self) -> Link | None:
        """The one link that the group uses, or None where it uses both."""
        if self.nodes == 1:
            return self.inside
        return self.between if self.per_node == 1 else None

    def hop(self, size: float, *, add: bool = False) -> tuple[float, float]:
        """Returns the seconds of a message inside a node, and of one spread over the NICs of a node's members."""
        inside = self.inside.time(size) + add * self.inside.combine * size
        return inside, self.between.time(size / self.per_node) + add * self.between.combine * size


def place(group: int, *, stride: int, domain: int, inside: Link, between: Link) -> Place:
    """Returns where the members of a mesh axis sit, on devices numbered node by node.

    Args:
      group: Size of the axis.
      stride: Devices from one member to the next: the product of the axes inside this one.
      domain: Devices of a node, that NVLink joins.
      inside: The link of a device to the others of its node.
      between: The NIC of a device.

    Raises:
      JaxparError: If the nodes would have members in unequal numbers, in any of the axis's groups.

    >>> link = Link(latency=1e-6, bandwidth=1e9)
    >>> place(16, stride=4, domain=8, inside=link, between=link).per_node
    2
    """
    for name, value in {"group": group, "stride": stride, "domain": domain}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refuse(f"{name}={value!r} of a placement", rule="a whole number, at least 1", fix=f"{name}=1")
    span = group * stride
    if group == 1 or stride >= domain:
        per_node = 1
    elif span <= domain and domain % span == 0:
        per_node = group
    elif stride < domain and domain % stride == 0 and span % domain == 0:
        per_node = domain // stride
    else:
        raise refuse(
            f"an axis of {group} devices, {stride} apart, on nodes of {domain}",
            rule="every node has equally many members of a group",
            fix=f"axis sizes whose products from the innermost on divide {domain}, or are multiples of it",
        )
    return Place(inside=inside, between=between, per_node=per_node, nodes=group // per_node)


def all_reduce(where: Place, size: float) -> Cost:
    """Returns the cheapest all-reduce of an array of `size` bytes."""
    if where.only:
        return collectives.cheapest(where.only, size, where.group)
    chunk = size / where.group
    flat = (where.group - 1) * (max(where.hop(chunk, add=True)) + max(where.hop(chunk)))
    across = collectives.cheapest(where.between, size / where.per_node, where.nodes)
    around = collectives.ring(where.inside, size, where.per_node)
    return _cheaper(Cost(flat, "flat ring"), Cost(around + across.seconds, f"hierarchical {across.algorithm}"))


def reduce_scatter(where: Place, size: float) -> Cost:
    """Returns the cheapest reduce-scatter of an array of `size` bytes."""
    return _scattered(where, size, collectives.reduce_scatter, add=True)


def all_gather(where: Place, size: float) -> Cost:
    """Returns the cheapest all-gather into an array of `size` bytes."""
    return _scattered(where, size, collectives.all_gather, add=False)


def all_to_all(where: Place, size: float) -> Cost:
    """Returns the cheapest exchange in which every member sends a part of its `size` bytes to each."""
    if where.only:
        return Cost(collectives.all_to_all(where.only, size, where.group), "pairwise")
    part, away = size / where.group, where.group - where.per_node
    direct = max((where.per_node - 1) * where.inside.time(part), away * where.between.time(part))
    inside = collectives.all_to_all(where.inside, size, where.per_node)
    across = collectives.all_to_all(where.between, size, where.nodes)
    return _cheaper(Cost(direct, "pairwise"), Cost(inside + across, "hierarchical"))


def broadcast(where: Place, size: float, *, chunks: int | None = None) -> Cost:
    """Returns a broadcast of `size` bytes along the chain of all members, node by node, in chunks."""
    if where.only:
        return Cost(collectives.broadcast(where.only, size, where.group, chunks=chunks), "chain")
    check(size, where.group)
    hops = where.nodes * (where.per_node - 1), where.nodes - 1

    def seconds(count: int) -> float:
        inside, between = where.hop(size / count)
        return hops[0] * inside + hops[1] * between + (count - 1) * max(inside, between)

    return Cost(min(map(seconds, [chunks] if chunks else CHUNKS)), "chain")


def permute(where: Place, size: float) -> Cost:
    """Returns one message of `size` bytes from every member to the next, over its own NIC where nodes differ."""
    check(size, where.group)
    return Cost((where.inside if where.nodes == 1 else where.between).time(size), "direct")


BY_KIND: dict[str, Callable[[Place, float], Cost]] = {
    "all-reduce": all_reduce,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "ragged-all-to-all": all_to_all,
    "collective-permute": permute,
    "collective-broadcast": broadcast,
}


def collective(kind: str, where: Place, size: float) -> Cost:
    """Returns the cheapest way to do a collective of one of `mesh.collective.KINDS`.

    Args:
      kind: Which.
      where: The group.
      size: Its payload in bytes, as `Collective.payload` says it.

    Raises:
      JaxparError: If there is no such kind, or the size is none.
    """
    if kind not in BY_KIND:
        raise refuse(f"a collective {kind!r}", rule=f"one of {', '.join(BY_KIND)}", fix=nearest(str(kind), BY_KIND))
    return BY_KIND[kind](where, size)


def _scattered(where: Place, size: float, flat: Callable[[Link, float, int], float], *, add: bool) -> Cost:
    if where.only:
        return Cost(flat(where.only, size, where.group), "ring")
    check(size, where.group)
    one = (where.group - 1) * max(where.hop(size / where.group, add=add))
    across = flat(where.between, size / where.per_node, where.nodes)
    return _cheaper(
        Cost(one, "flat ring"), Cost(flat(where.inside, size, where.per_node) + across, "hierarchical ring")
    )


def _cheaper(*costs: Cost) -> Cost:
    return min(costs, key=lambda cost: cost.seconds)
