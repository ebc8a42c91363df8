"""Parameters whose dims were guessed, because a layout is made before there is a batch.

A bare NNX model that is given by its factory alone is cut over `tensor` by the paths and shapes of its parameters. The
first batch shows what the model does with them; what that would have told otherwise is said then.
"""

import warnings
from collections.abc import Callable
from typing import Any

from jaxpar.parallel.layout import Layout
from jaxpar.parallel.placing import placed
from jaxpar.sharding.names import LARGE
from jaxpar.sharding.reading.called import as_called


def check_dims(layout: Layout, call: Callable[[Any], Any]) -> None:
    """Warns if large parameters would be cut otherwise by what the model does with them.

    Where both cut the same dims and only one gathers a parameter before it is used, there is nothing to say: a device
    then sends the sum of an activation or the parameter, and either may be less (the classifier of ViT-L: the sum).

    Args:
      layout: Where they are.
      call: Calls a model as a step does: its loss, on a batch of zeros.
    """
    blueprint = layout.blueprint
    guessed = [
        path for path, place in layout.placements.items() if place.leaf.names is None and place.leaf.bytes >= LARGE
    ]
    if blueprint.program is not None or not guessed:
        return
    known, _ = placed(layout.parallel, as_called(blueprint, call), layout.mesh)
    wrong = [path for path in guessed if known.placements[path].whole != layout.placements[path].whole]
    if wrong:
        path = max(wrong, key=lambda path: layout.placements[path].leaf.bytes)
        more = f"; so are {len(wrong) - 1} more of {len(guessed)}" * (len(wrong) > 1)
        warnings.warn(
            f"{blueprint.name}: {path} is placed as {layout.describe(path)} ({layout.placements[path].why}), and by "
            f"what the model does with it would be {known.describe(path)} ({known.placements[path].why}){more}\n"
            f'  fix: jp.compose(jp.nnx({blueprint.name}, batch["inputs"]), ...), or paths in jp.Parallel',
            stacklevel=4,
        )
