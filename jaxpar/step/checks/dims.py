"""Parameters whose dims were guessed, because a layout is made before there is a batch.

A bare NNX model that is given by its factory alone is cut over `tensor` by the paths and shapes of its parameters. The
first batch shows what the model does with them; what that would have told otherwise is said then.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpar.parallel.layout import Layout
from jaxpar.parallel.placing import placed
from jaxpar.sharding.names import LARGE
from jaxpar.sharding.reading.called import as_called, zeros
from jaxpar.step.keyed.loss import shaped


def check_dims(layout: Layout, loss: Callable, batch: Mapping[str, Any]) -> None:
    """Warns if large parameters would be cut otherwise by what the model does with them.

    Args:
      layout: Where they are.
      loss: Of (model, batch), or of (model, batch, key).
      batch: Name to anything with shape and dtype.
    """
    blueprint = layout.blueprint
    guessed = [
        path for path, place in layout.placements.items() if place.leaf.names is None and place.leaf.bytes >= LARGE
    ]
    if blueprint.program is not None or not guessed:
        return
    called = as_called(blueprint, lambda model: shaped(loss)(model, jax.tree.map(zeros, dict(batch))))
    known, _ = placed(layout.parallel, called, layout.mesh)
    wrong = [path for path in guessed if known.placements[path].used != layout.placements[path].used]
    if wrong:
        path = max(wrong, key=lambda path: layout.placements[path].leaf.bytes)
        more = f"; so are {len(wrong) - 1} more of {len(guessed)}" * (len(wrong) > 1)
        warnings.warn(
            f"{blueprint.name}: {path} is placed as {layout.describe(path)} ({layout.placements[path].why}), and by "
            f"what the model does with it would be {known.describe(path)} ({known.placements[path].why}){more}\n"
            f'  fix: jp.compose(jp.nnx({blueprint.name}, batch["inputs"]), ...), or paths in jp.Parallel',
            stacklevel=4,
        )
