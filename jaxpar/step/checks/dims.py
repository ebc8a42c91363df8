"""Warns when the first batch shows that a guessed dim name was wrong.

The layout of an NNX model that is given only by its factory is made before there is a batch, so `tensor` splits its
parameters by paths and shapes. The first batch shows how the model uses them.
"""

import warnings
from collections.abc import Callable
from typing import Any

from jaxpar.parallel.layout import Layout
from jaxpar.parallel.place_arrays import place_arrays
from jaxpar.sharding.infer_names.trace_call import with_program
from jaxpar.sharding.names import LARGE


def check_dims(layout: Layout, call: Callable[[Any], Any]) -> None:
    """Warns if the traced model would split large parameters differently.

    It does not warn if both split the same dims and only one gathers the parameter before its use: then a device sends
    either a sum of activations or the parameter, and either may be smaller (for the classifier of ViT-L: the sum).

    Args:
      layout: The layout made from guesses.
      call: Calls a model as the step does: its loss, on a batch of zeros.
    """
    blueprint = layout.blueprint
    guessed = [
        path for path, place in layout.placements.items() if place.leaf.names is None and place.leaf.bytes >= LARGE
    ]
    if blueprint.program is not None or not guessed:
        return
    traced, _ = place_arrays(layout.parallel, with_program(blueprint, call), layout.mesh)
    wrong = [path for path in guessed if traced.placements[path].whole != layout.placements[path].whole]
    if wrong:
        path = max(wrong, key=lambda path: layout.placements[path].leaf.bytes)
        more = f"; so are {len(wrong) - 1} more of {len(guessed)}" * (len(wrong) > 1)
        warnings.warn(
            f"{blueprint.name}: {path} is placed as {layout.describe(path)} ({layout.placements[path].why}), and by "
            f"what the model does with it would be {traced.describe(path)} ({traced.placements[path].why}){more}\n"
            f'  fix: jp.compose(jp.from_nnx({blueprint.name}, batch["inputs"]), ...), or paths in jp.Parallel',
            stacklevel=4,
        )
