"""The random streams that a Linen module draws from: nobody lists them, so they are tried until none is missing."""

import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
from flax.errors import InvalidRngError

from jaxpar.errors import refuse
from jaxpar.sharding.names import Program


def drawing_from(apply: Callable[..., Any], key: jax.Array, streams: tuple[str, ...]) -> Callable[..., Any]:
    """Returns `apply` with a key for every random stream that the module draws from in this call.

    The example call may have been a deterministic one, which draws from fewer: the streams that it does not know are
    tried until none is missing. Their keys are of their names, so that parts of a model draw as the whole does.

    Args:
      apply: Of a Linen module.
      key: Of this call.
      streams: Those that the example call draws from.
    """
    # each stream a key of its own: of one key, dropout and noise would draw the same bits
    rngs = {name: jax.random.fold_in(key, index) for index, name in enumerate(streams)}

    def drawing(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return apply(*args, rngs=rngs, **kwargs)
            except InvalidRngError as error:
                missing = re.search(r'needs PRNG for "(\w+)"', str(error))
                if missing is None or missing[1] in rngs:
                    raise
                rngs[missing[1]] = jax.random.fold_in(key, zlib.crc32(missing[1].encode()))

    return drawing


def with_streams(trace: Callable[[tuple[str, ...]], Program], name: str) -> tuple[tuple[str, ...], Program]:
    """Returns the random streams a module draws from, and its call traced with them: tried until none is missing.

    Linen lets a missing stream fall back to `params`, which a scan may share between its steps; so
    each gets a key of its own, and `params` is not there to fall back to.
    """
    names: tuple[str, ...] = ("dropout",)
    while True:
        try:
            return names, trace(names)
        except InvalidRngError as error:
            missing = re.search(r'needs PRNG for "(\w+)"', str(error))
            if missing is None or missing[1] in names:
                raise refuse(
                    f"{name}: {error}", rule="a module draws from named random streams", fix="self.make_rng('noise')"
                ) from error
            names = (*names, missing[1])
