"""Calls of a Linen module in a traced step: the parameters that it reads, its random streams, and values that it sows.

Each parameter is gathered and cast where the module reads it:

    self.param("kernel", ...)                         ─┐
    self.variables["params"]["embed"]["embedding"]    ─┼─► values["kernel"] ─► use(path, stored) ─► read
    nn.scan, nn.remat, nn.map_variables, jax.tree      ───► stored: a nested dict of plain arrays

The random streams that it draws from are found by retrying a call with each stream that it lacked.
"""

import inspect
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
from flax import linen as nn
from flax.errors import InvalidRngError

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.stack import is_intercepted
from jaxpar.sharding.adapters import AdaptedMatrix
from jaxpar.sharding.flax_layers import method_overrides, replace_method
from jaxpar.sharding.names import Program, Use, format_path

TRAINING = {"deterministic": False, "train": True, "training": True, "is_training": True}


class Parameters(dict):
    """A nested dict of stored parameters that applies `use` to each parameter that is read by name.

    `jax.tree`, and so Flax's lifted transforms, see the leaves and paths of the plain nested dict: layers that a scan
    slices are gathered inside of its body, and values that a module computes from its own parameters (`nn.WeightNorm`)
    are computed from the shards as stored, and gathered where a layer reads them.
    """

    def __init__(self, stored: Mapping[str, object], use: Use, inside: str = ""):
        """Wraps stored parameters.

        Args:
          stored: Name to array, or to a dict of them.
          use: Maps (path, stored parameter) to the value that the module reads.
          inside: The path of `stored` with a trailing "/"; "" for all parameters of a module.
        """
        child = lambda name: f"{inside}{name}/"  # noqa: E731
        super().__init__({k: Parameters(v, use, child(k)) if type(v) is dict else v for k, v in stored.items()})
        self.use, self.inside = use, inside

    def __getitem__(self, name: str) -> Any:
        value, path = super().__getitem__(name), self.inside + name
        if isinstance(value, dict):
            return value
        # an array; or a tuple of them, where an initializer returns one
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: self.use(format_path([path, *keys]), leaf),
            value,
            is_leaf=lambda leaf: isinstance(leaf, AdaptedMatrix),
        )

    # without an own __iter__, dict(...), {**...} and copy() would bypass __getitem__ and take the stored values
    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return super().__iter__()

    def get(self, name: str, default: object = None) -> Any:
        """Returns the gathered value of a name, or the default."""
        return self[name] if name in self else default

    def items(self) -> Any:
        """Returns each name with its gathered value."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Returns the gathered value of each name."""
        return [self[name] for name in self]


def to_dict(tree: object) -> Any:
    """Converts to a plain nested dict of stored values, without reading any."""
    if not isinstance(tree, dict):
        return tree
    return {name: to_dict(dict.__getitem__(tree, name)) for name in tree}


def _flatten_with_keys(tree: Parameters):
    names = sorted(tree)
    return [(jax.tree_util.DictKey(name), dict.__getitem__(tree, name)) for name in names], _aux(tree, names)


def _flatten(tree: Parameters):
    names = sorted(tree)
    return [dict.__getitem__(tree, name) for name in names], _aux(tree, names)


def _aux(tree: Parameters, names: list[str]) -> tuple:
    return tuple(names), tree.use, tree.inside


def _unflatten(aux: tuple, values) -> Parameters:
    names, use, inside = aux
    return Parameters(dict(zip(names, values, strict=True)), use, inside)


jax.tree_util.register_pytree_with_keys(Parameters, _flatten_with_keys, _unflatten, _flatten)


@dataclass(frozen=True)
class Streams:
    """The random streams of a module.

    Attributes:
      names: Streams that the example call draws from, in order of use.
      complete: Whether it is an error if a call draws from another stream.
    """

    names: tuple[str, ...] = ("dropout",)
    complete: bool = False


def with_rngs(apply: Callable[..., Any], key: jax.Array, streams: Streams) -> Callable[..., Any]:
    """Wraps `apply` so that it passes a key for every random stream that the module draws from.

    The example call may be deterministic and draw from fewer streams, so the wrapper retries the call with each missing
    stream. A pipeline traces its stages separately, so it needs all streams in the example call.

    Args:
      apply: `apply` of a Linen module.
      key: Key of this call.
      streams: Streams of the module.
    """
    # one key per stream: with the same key, dropout and noise would draw the same bits
    rngs = {name: jax.random.fold_in(key, index) for index, name in enumerate(streams.names)}

    def drawing(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return apply(*args, rngs=rngs, **kwargs)
            except InvalidRngError as error:
                missing = re.search(r'needs PRNG for "(\w+)"', str(error))
                if missing is None or missing[1] in rngs or streams.complete:
                    raise
                if is_intercepted():  # pipeline stages are traced separately, each with the same keys
                    raise _new_stream_error(apply, missing[1]) from error
                rngs[missing[1]] = jax.random.fold_in(key, zlib.crc32(missing[1].encode()))

    return drawing


def _new_stream_error(apply: Callable[..., Any], stream: str) -> JaxparError:
    module: Any = getattr(apply, "__self__", apply)
    parameters = inspect.signature(type(module).__call__).parameters
    keyword = next((word for word in TRAINING if word in parameters), "deterministic")
    return refuse(
        f"{type(module).__name__} draws from the random stream {stream!r} in training, and not in its example call",
        rule="a pipeline knows the streams that a model draws from by its example call",
        fix=f"jp.from_linen({type(module).__name__}(...), inputs, {keyword}={TRAINING[keyword]})",
    )


def find_streams(trace: Callable[[Streams], Program], name: str) -> tuple[Streams, Program]:
    """Finds a module's random streams by tracing its call again until none is missing; returns them and the trace.

    Linen lets a missing stream fall back to `params`, which a scan may share between its steps; so each stream gets its
    own key, and `params` is not available as a fallback.
    """
    names: tuple[str, ...] = ("dropout",)
    while True:
        try:
            return Streams(names), trace(Streams(names, complete=True))
        except InvalidRngError as error:
            missing = re.search(r'needs PRNG for "(\w+)"', str(error))
            if missing is None or missing[1] in names:
                raise refuse(
                    f"{name}: {error}", rule="a module draws from named random streams", fix="self.make_rng('noise')"
                ) from error
            names = (*names, missing[1])


# Separates the values that a Linen module sows from its state, by recording the calls of `sow`.
#
# self.sow("seen", "h", h)                                    a tuple that each call would lengthen: created anew
# self.sow("seen", "total", h, add, lambda: 0.0)              of constant shape: state, as any other variable
# self.variable("seen", "carry", lambda: (zeros, zeros))      state

Path = tuple[str, ...]  # collection, modules, name
_record: ContextVar[Callable[[Path, bool], None] | None] = ContextVar("record", default=None)


@contextmanager
def recording_sows(record: Callable[[Path, bool], None]) -> Iterator[None]:
    """Calls `record` with the path of each sown value, and whether its shapes stay the same if it is sown again."""
    token = _record.set(record)
    try:
        with method_overrides():
            replace_method(nn.Module, "sow", _sow)
            yield
    finally:
        _record.reset(token)


def split_sown(tree: Mapping[str, Any], sown: Collection[Path], prefix: Path) -> tuple[dict, dict]:
    """Splits a nested dict of variables into (state, sown values).

    Args:
      tree: The nested dict, or a subtree of it.
      sown: Paths of the sown values.
      prefix: The path of `tree`.
    """
    state, sown_values = {}, {}
    for name, value in tree.items():
        path = (*prefix, name)
        if path in sown:
            sown_values[name] = value
        elif isinstance(value, dict) and value:
            child_state, child_sown = split_sown(value, sown, path)
            state |= {name: child_state} if child_state else {}
            sown_values |= {name: child_sown} if child_sown else {}
        else:
            state[name] = value
    return state, sown_values


def _sow(before: Callable) -> Callable:
    @wraps(before)
    def sow(self, col, name, value, reduce_fn=nn.module.tuple_reduce, init_fn=nn.module.tuple_init):
        stored, record = before(self, col, name, value, reduce_fn, init_fn), _record.get()
        if stored and record is not None:
            variable = self.get_variable(col, name)
            record((col, *self.path, name), _shapes(reduce_fn(variable, value)) == _shapes(variable))
        return stored

    return sow


def _shapes(tree: object) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", ()) for leaf in leaves]
