"""The gradients of layers that are sums over examples, and what cuts each of them along an axis."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.models.named import axes_of
from jaxpar.pipeline.jaxprs.dataflow import REMAT, Scan, consts_of, jaxpr_of, shapes, variables
from jaxpar.sharding.shard_bytes import pieces

FREE = PartitionSpec.UNCONSTRAINED
SMALL = 2**23  # bytes of a layer's gradients: over NVLink some 50 us, little more than a sum costs to start


@dataclass(frozen=True)
class Sum:
    """A gradient of a layer: a sum over examples, and what is done to it.

    Attributes:
      eqn: The equation that sums, over dim 0 of what it reads among others.
      after: Equations of one input that make the gradient of it.
    """

    eqn: JaxprEqn
    after: tuple[JaxprEqn, ...]

    def scatters(self, axis: str) -> int | None:
        """Returns the number of the equation after which an axis cuts the gradient; None where it cuts none."""
        return next((i for i, eqn in enumerate(self.after) if axis in axes_along(eqn)), None)

    def fits(self, axis: str) -> bool:
        """Returns whether the gradient can be of [replica, ...] until one reduce-scatter over the axis, or to the end.

        It cannot where the axis shares a dim with another one, or cuts it into pieces that are not equal; nor where
        it is cast before it travels: devices send the bits that the sum has.
        """
        at = self.scatters(axis)
        if any(map(is_cast, self.after[:at])):
            return False
        return at is None or cut_along(self.after[at], axis) is not None

    def later(self, axis: str) -> tuple[JaxprEqn, ...]:
        """Returns what is done to the gradient from where an axis cuts it on."""
        at = self.scatters(axis)
        return () if at is None else self.after[at:]

    def more(self, axis: str) -> float:
        """Returns bytes of a device by which the gradient, not yet cut along an axis, is larger than its shard."""
        if not (later := self.later(axis)):
            return 0
        on, made = later[0].params["sharding"], shapes(later[0].outvars)[0]
        ways = math.prod(pieces(on.spec, len(made.shape), on.mesh.shape))
        return made.size * made.dtype.itemsize / ways * (on.mesh.shape[axis] - 1)


def body_of(scan: Scan) -> tuple[Jaxpr, Sequence]:
    """Returns the body of a scan, of one layer that is computed again also that of the layer."""
    body, consts = scan.body, scan.body_consts
    if len(body.eqns) == 1 and body.eqns[0].primitive.name in REMAT and not body.eqns[0].params["prevent_cse"]:
        (eqn,) = body.eqns
        inner = jaxpr_of(eqn.params["jaxpr"])
        ends = [*eqn.invars, *body.outvars]
        plain = not consts and len(variables(ends)) == len(ends) and {*eqn.invars} == {*body.invars}
        if plain and {*body.outvars} <= {*eqn.outvars}:
            own: dict[Any, Any] = dict(zip(eqn.invars, inner.invars, strict=True))
            made: dict[Any, Any] = dict(zip(eqn.outvars, inner.outvars, strict=True))
            ins, outs = [own[var] for var in body.invars], [made[var] for var in body.outvars]
            return inner.replace(invars=ins, outvars=outs), consts_of(eqn.params["jaxpr"])
    return body, consts


def sums_of(eqn: JaxprEqn, axis: str, ways: int, rows: int) -> dict[int, Sum]:
    """Returns the sums over examples among the stacks that a scan makes, by their number; none where they are large."""
    if eqn.primitive.name != "scan":
        return {}
    scan = Scan(eqn)
    body, _ = body_of(scan)
    made = {var: each for each in body.eqns for var in each.outvars}
    read = [*body.outvars, *(var for each in body.eqns for var in each.invars)]
    times = Counter(var for var in read if not isinstance(var, Literal))
    found = {}
    for i, var in enumerate(body.outvars[scan.carry :]):
        if rows % ways == 0 and (one := _sum(var, made, times, rows)) and one.fits(axis):
            found[i] = one
    size = sum(body.outvars[scan.carry + i].aval.size * body.outvars[scan.carry + i].aval.dtype.itemsize for i in found)
    return found if size <= SMALL else {}


def _sum(var: Any, made: dict[Var, JaxprEqn], times: Counter[Var], rows: int) -> Sum | None:
    after: list[JaxprEqn] = []
    while not isinstance(var, Literal) and (eqn := made.get(var)) is not None and times[var] == 1:
        name = eqn.primitive.name
        if name == "transpose" or _is_constraint(eqn) or is_cast(eqn):
            after.append(eqn)
            var = eqn.invars[0]
            continue
        if name == "dot_general":
            (left, right), batch = eqn.params["dimension_numbers"]
            over = any(pair == (0, 0) for pair in zip(left, right, strict=True)) and not any(batch)
        else:
            over = name == "reduce_sum" and 0 in eqn.params["axes"]
        return Sum(eqn, tuple(after[::-1])) if over and _of_examples(shapes(eqn.invars)[0].shape, rows) else None
    return None


def _of_examples(shape: tuple[int, ...], rows: int) -> bool:
    """Returns whether dim 0 of an activation is the examples of a batch, or all of their tokens."""
    return shape[0] == rows or (len(shape) == 2 and shape[0] % rows == 0)


def cut_along(eqn: JaxprEqn, axis: str) -> int | None:
    """Returns the dim that an equation constrains to be cut along an axis and no other; None where it does not.

    None also where pieces are not equal or a dim is left to XLA, for which there is no reduce-scatter.
    """
    if axis not in axes_along(eqn):
        return None
    on, shape = eqn.params["sharding"], shapes(eqn.outvars)[0].shape
    if FREE in on.spec:
        return None
    if any(size % ways for size, ways in zip(shape, pieces(on.spec, len(shape), on.mesh.shape), strict=True)):
        return None
    return next((dim for dim, entry in enumerate(on.spec) if axes_of(entry) == (axis,)), None)


def is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _is_constraint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "sharding_constraint" and isinstance(eqn.params["sharding"], NamedSharding)


def axes_along(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the axes that an equation constrains its array to be cut along."""
    spec = eqn.params["sharding"].spec if _is_constraint(eqn) else ()
    return tuple(axis for entry in spec for axis in axes_of(entry))
