"""The random streams that a Linen module draws from: nobody lists them, so they are tried until none is missing."""

import inspect
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax.errors import InvalidRngError

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.stack import is_cut
from jaxpar.sharding.names import Program

TRAINING = {"deterministic": False, "train": True, "training": True, "is_training": True}


@dataclass(frozen=True)
class Streams:
    """The random streams of a module.

    Attributes:
      names: Those that its example call draws from, in that order.
      complete: Whether a call that draws from another one is an error.
    """

    names: tuple[str, ...] = ("dropout",)
    complete: bool = False


def drawing_from(apply: Callable[..., Any], key: jax.Array, streams: Streams) -> Callable[..., Any]:
    """Returns `apply` with a key for every random stream that the module draws from in this call.

    The example call may have been a deterministic one, which draws from fewer: the streams that it does not know are
    tried until none is missing. A pipeline, which traces a model in pieces, needs them in the example call.

    Args:
      apply: Of a Linen module.
      key: Of this call.
      streams: Of the module.
    """
    # each stream a key of its own: of one key, dropout and noise would draw the same bits
    rngs = {name: jax.random.fold_in(key, index) for index, name in enumerate(streams.names)}

    def drawing(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return apply(*args, rngs=rngs, **kwargs)
            except InvalidRngError as error:
                missing = re.search(r'needs PRNG for "(\w+)"', str(error))
                if missing is None or missing[1] in rngs or streams.complete:
                    raise
                if is_cut():  # the pieces of a pipeline are traced apart, each with the same keys
                    raise _refused(apply, missing[1]) from error
                rngs[missing[1]] = jax.random.fold_in(key, zlib.crc32(missing[1].encode()))

    return drawing


def _refused(apply: Callable[..., Any], stream: str) -> JaxparError:
    module: Any = getattr(apply, "__self__", apply)
    known = inspect.signature(type(module).__call__).parameters
    keyword = next((word for word in TRAINING if word in known), "deterministic")
    return refuse(
        f"{type(module).__name__} draws from the random stream {stream!r} in training, and not in its example call",
        rule="a pipeline knows the streams that a model draws from by its example call",
        fix=f"jp.linen({type(module).__name__}(...), inputs, {keyword}={TRAINING[keyword]})",
    )


def with_streams(trace: Callable[[Streams], Program], name: str) -> tuple[Streams, Program]:
    """Returns the random streams a module draws from, and its call traced with them: tried until none is missing.

    Linen lets a missing stream fall back to `params`, which a scan may share between its steps; so
    each gets a key of its own, and `params` is not there to fall back to.
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
