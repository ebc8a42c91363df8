"""Finds gradients of layers that are sums over examples, and the equations that shard these over an axis."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.jaxprs.dataflow import REMAT, Scan, jaxpr_consts, shapes, unwrap_jaxpr, variables
from jaxpar.models.dim_names import spec_axes
from jaxpar.sharding.names import shard_counts

FREE = PartitionSpec.UNCONSTRAINED
SMALL = 2**23  # bytes of a layer's gradients: some 50 us over NVLink, little more than the launch of a sum


@dataclass(frozen=True)
class ExampleSum:
    """A gradient of a layer: a sum over examples, and the equations after it.

    Attributes:
      eqn: The equation that sums over a dim of its operands that holds examples, and possibly over other dims.
      later_equations: The equations, with a single input each, that compute the gradient from the sum.
      dim: The dim of examples: 0, or 1 in a matmul per expert, [experts, tokens, ...].
    """

    eqn: JaxprEqn
    later_equations: tuple[JaxprEqn, ...]
    dim: int = 0

    def scatter_index(self, axis: str) -> int | None:
        """Returns the index in `later_equations` of the equation that shards the gradient over an axis, or None."""
        return next((i for i, eqn in enumerate(self.later_equations) if axis in constraint_axes(eqn)), None)

    def can_wait(self, axis: str) -> bool:
        """Whether the gradient can stay unreduced, [replica, ...], until it is reduce-scattered or summed.

        It cannot if the axis shards it but `can_scatter` is false. Nor can it if the gradient is cast before it is
        sharded, because the moved sum would send the uncast dtype.
        """
        index = self.scatter_index(axis)
        if any(map(is_cast, self.later_equations[:index])):
            return False
        return index is None or self.can_scatter(axis)

    def can_scatter(self, axis: str) -> bool:
        """Whether an explicit reduce-scatter can shard the gradient over the axis: see `split_dim`."""
        index = self.scatter_index(axis)
        return index is not None and split_dim(self.later_equations[index], axis) is not None

    def remaining_equations(self, axis: str) -> tuple[JaxprEqn, ...]:
        """Returns `later_equations` from the equation that shards the gradient over an axis."""
        index = self.scatter_index(axis)
        return () if index is None else self.later_equations[index:]

    def shard_bytes(self, axis: str) -> float:
        """Returns the bytes per device of the gradient where the axis shards it; 0 if it does not."""
        if not (remaining := self.remaining_equations(axis)):
            return 0
        sharding, gradient = remaining[0].params["sharding"], shapes(remaining[0].outvars)[0]
        ways = math.prod(shard_counts(sharding.spec, len(gradient.shape), sharding.mesh.shape))
        return gradient.size * gradient.dtype.itemsize / ways

    def extra_bytes(self, axis: str) -> float:
        """Returns the additional bytes per device of the gradient before the axis shards it."""
        remaining = self.remaining_equations(axis)
        return self.shard_bytes(axis) * (remaining[0].params["sharding"].mesh.shape[axis] - 1) if remaining else 0


def scan_body(scan: Scan) -> tuple[Jaxpr, Sequence]:
    """Returns the body of a scan; if the body is a single checkpointed call, the body of that call."""
    body, consts = scan.body, scan.body_consts
    if len(body.eqns) == 1 and body.eqns[0].primitive.name in REMAT and not body.eqns[0].params["prevent_cse"]:
        (eqn,) = body.eqns
        inner = unwrap_jaxpr(eqn.params["jaxpr"])
        ends = [*eqn.invars, *body.outvars]
        plain = not consts and len(variables(ends)) == len(ends) and {*eqn.invars} == {*body.invars}
        if plain and {*body.outvars} <= {*eqn.outvars}:
            inner_inputs: dict[Any, Any] = dict(zip(eqn.invars, inner.invars, strict=True))
            inner_outputs: dict[Any, Any] = dict(zip(eqn.outvars, inner.outvars, strict=True))
            ins, outs = [inner_inputs[var] for var in body.invars], [inner_outputs[var] for var in body.outvars]
            return inner.replace(invars=ins, outvars=outs), jaxpr_consts(eqn.params["jaxpr"])
    return body, consts


def find_sums(eqn: JaxprEqn, axis: str, ways: int, rows: int) -> dict[int, ExampleSum]:
    """Returns the sums over examples among the stacked outputs of a scan, by index; not those of experts.

    Large sums are left out if they would wait until the end; a reduce-scatter in the scan has no limit.
    """
    sums = {i: gradient for i, gradient in _all_sums(eqn, axis, ways, rows).items() if gradient.dim == 0}
    scattered = {i: gradient for i, gradient in sums.items() if gradient.can_scatter(axis)}
    waiting = {i: gradient for i, gradient in sums.items() if i not in scattered and gradient.can_wait(axis)}
    outputs = shapes(gradient.eqn.outvars[0] for gradient in waiting.values())
    size = sum(x.size * x.dtype.itemsize for x in outputs)
    return scattered | waiting if size <= SMALL else scattered


def find_shard_sums(eqn: JaxprEqn, axis: str, ways: int, rows: int, shards: str, limit: float) -> dict[int, ExampleSum]:
    """Returns the sums that each replica along `axis` can keep as shards until the end of a scan, by index.

    These gradients are reduce-scattered over `shards` alone, inside of the scan; gradients of experts, whose examples
    `shards` does not split, are not. If a layer's shards exceed `limit` bytes per device, no sum is returned.
    """

    def fits(gradient: ExampleSum) -> bool:
        cut = gradient.scatter_index(shards) is None if gradient.dim else gradient.can_scatter(shards)
        return cut and gradient.scatter_index(axis) is None

    sums = {i: gradient for i, gradient in _all_sums(eqn, axis, ways, rows).items() if fits(gradient)}
    return sums if sum(gradient.shard_bytes(shards) for gradient in sums.values()) <= limit else {}


def _all_sums(eqn: JaxprEqn, axis: str, ways: int, rows: int) -> dict[int, ExampleSum]:
    if eqn.primitive.name != "scan" or rows % ways:
        return {}
    scan = Scan(eqn)
    body, _ = scan_body(scan)
    producers = {var: body_eqn for body_eqn in body.eqns for var in body_eqn.outvars}
    reads = [*body.outvars, *(var for body_eqn in body.eqns for var in body_eqn.invars)]
    times = Counter(var for var in reads if not isinstance(var, Literal))
    of_experts = _expert_tokens(body, producers, axis)
    outputs = enumerate(body.outvars[scan.carry :])
    return {i: gradient for i, var in outputs if (gradient := _sum(var, producers, times, rows, of_experts))}


def _sum(
    var: Var | Literal, made: dict[Var, JaxprEqn], times: Counter[Var], rows: int, of_experts: set[tuple[int, ...]]
) -> ExampleSum | None:
    chain: list[JaxprEqn] = []
    while not isinstance(var, Literal) and (eqn := made.get(var)) is not None and times[var] == 1:
        name = eqn.primitive.name
        if name == "transpose" or _is_constraint(eqn) or is_cast(eqn):
            chain.append(eqn)
            var = eqn.invars[0]
            continue
        shape = shapes(eqn.invars)[0].shape
        if name == "dot_general":
            (left, right), batch = eqn.params["dimension_numbers"]
            over = any(pair == (0, 0) for pair in zip(left, right, strict=True)) and not any(batch)
            if all(tuple(dims) == (1,) for dims in (left, right)) and all(tuple(dims) == (0,) for dims in batch):
                return ExampleSum(eqn, tuple(chain[::-1]), dim=1) if shape[:2] in of_experts else None
        else:
            over = name == "reduce_sum" and 0 in eqn.params["axes"]
        return ExampleSum(eqn, tuple(chain[::-1])) if over and _of_examples(shape, rows) else None
    return None


def _expert_tokens(body: Jaxpr, producers: dict[Var, JaxprEqn], axis: str) -> set[tuple[int, ...]]:
    """Returns the sizes (experts, tokens) of arrays [experts, tokens, ...] whose tokens the axis splits outermost.

    Such arrays are results of a `shard_map`, perhaps reshaped: its out_specs tell that the axis splits the tokens. Any
    other array would need an all-to-all of its tokens before the sum could be divided.
    """
    result = set()
    for eqn in body.eqns:
        if eqn.primitive.name != "reshape" or isinstance(var := eqn.invars[0], Literal):
            continue
        island = producers.get(var)
        if island is None or island.primitive.name != "shard_map":
            continue
        before, after = shapes(eqn.invars)[0].shape, shapes(eqn.outvars)[0].shape
        spec = island.params["out_specs"][island.outvars.index(var)]
        dim = next((dim for dim, entry in enumerate(spec) if spec_axes(entry)[:1] == (axis,)), 0)
        merged = len(after) > 1 and before[0] == after[0] and after[1] % before[dim] == 0
        if dim > 0 and merged and math.prod(before[1:dim]) == 1:
            result.add(after[:2])
    return result


def _of_examples(shape: tuple[int, ...], rows: int) -> bool:
    """Whether dim 0 of an activation is the examples of a batch, or all of their tokens."""
    return shape[0] == rows or (len(shape) == 2 and shape[0] % rows == 0)


def split_dim(eqn: JaxprEqn, axis: str) -> int | None:
    """Returns the dim that an equation's sharding constraint splits over this axis alone; None if there is none.

    Also None if the shards would be unequal or the constraint leaves a dim to XLA, as there is then no reduce-scatter,
    and if two axes split another dim, because XLA then computes wrong sums.
    """
    if axis not in constraint_axes(eqn):
        return None
    target, shape = eqn.params["sharding"], shapes(eqn.outvars)[0].shape
    if FREE in target.spec or any(len(spec_axes(entry)) > 1 for entry in target.spec):
        return None
    if any(
        size % ways for size, ways in zip(shape, shard_counts(target.spec, len(shape), target.mesh.shape), strict=True)
    ):
        return None
    return next((dim for dim, entry in enumerate(target.spec) if spec_axes(entry) == (axis,)), None)


def is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _is_constraint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "sharding_constraint" and isinstance(eqn.params["sharding"], NamedSharding)


def constraint_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the axes over which an equation's constraint splits its array."""
    spec = eqn.params["sharding"].spec if _is_constraint(eqn) else ()
    return tuple(axis for entry in spec for axis in spec_axes(entry))
