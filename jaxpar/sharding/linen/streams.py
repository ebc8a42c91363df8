"""Finds the random streams that a Linen module draws from: retries a call with each stream that it lacked."""

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
from jaxpar.sharding.calls.methods import method_overrides, replace_method
from jaxpar.sharding.names import Program

TRAINING = {"deterministic": False, "train": True, "training": True, "is_training": True}


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


def _shapes(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", ()) for leaf in leaves]
