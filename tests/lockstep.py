"""A program of collectives on any number of devices, none of which is there: traced, and evaluated in lockstep.

messages   what the `ppermute`s of the traced program send: (source, target, bytes), one by one
evaluated  what it computes: every operation for all devices at once, and a `ppermute` as its pairs say
"""

from functools import partial

import jax
import numpy as np

AXIS = "data"


def traced(program, x):
    """Returns the jaxpr of a program on one device. x: [devices, ...]."""
    return jax.make_jaxpr(lambda x: program(x, AXIS), axis_env=[(AXIS, len(x))])(x[0])


def messages(traced):
    found = []
    for each in equations(traced.jaxpr):
        if each.primitive.name == "ppermute":
            size = each.invars[0].aval.size * each.invars[0].aval.dtype.itemsize
            found += [(source, target, size) for source, target in each.params["perm"]]
    return found


def equations(jaxpr):
    for each in jaxpr.eqns:
        inner = inner_of(each)
        yield from [each] if inner is None else equations(inner.jaxpr)


def inner_of(equation):
    return equation.params.get("jaxpr")


def evaluated(traced, x):
    """Returns what all devices end with. Shape [devices, ...]."""
    (found,) = on_all(traced, [x])
    return np.asarray(found)


def on_all(traced, arrays):
    """Evaluates a jaxpr: every value is an array [devices, ...]."""
    devices = len(arrays[0])
    all_have = lambda value: np.stack([np.asarray(value)] * devices)  # noqa: E731
    jaxpr, values = traced.jaxpr, {}
    values |= dict(zip(jaxpr.invars, arrays, strict=True))
    values |= {var: all_have(const) for var, const in zip(jaxpr.constvars, traced.consts, strict=True)}
    for each in jaxpr.eqns:
        given = [all_have(atom.val) if hasattr(atom, "val") else values[atom] for atom in each.invars]
        inner = inner_of(each)
        if each.primitive.name == "ppermute":
            made = np.zeros_like(given[0])
            for source, target in each.params["perm"]:
                made[target] = given[0][source]
        elif each.primitive.name == "axis_index":
            made = np.arange(devices, dtype=np.int32)
        elif inner is not None:
            made = on_all(inner, given)
        elif given:
            made = jax.vmap(partial(each.primitive.bind, **each.params))(*given)
        else:
            made = all_have(each.primitive.bind(**each.params))
        several = each.primitive.multiple_results
        values |= dict(zip(each.outvars, map(np.asarray, made if several else [made]), strict=True))
    return [values[var] for var in jaxpr.outvars]
