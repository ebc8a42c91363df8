"""Where a pipeline runs its head, what follows the layers: on the last stage, or on all of them.

    last      every stage holds the head whole, since one program runs on all of them
    spread    every stage holds its share of `vocab`; per microbatch what comes out of the layers goes to all stages,
              and its gradient comes back

While the table runs, a parameter of the head takes `HELD` bytes on a device. `auto` compares these bytes, and takes
`spread` where it frees at least `LEAST` of them and everything that it asks for is there.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxpar.errors import Problem
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout, Placement
from jaxpar.parallel.pipe import HELD, LEAST
from jaxpar.sharding.place import shard_bytes
from jaxpar.units import show_bytes

Compose = Callable[[Parallel], tuple[Layout, list[Problem]]]


def placed_head(layout: Layout, compose: Compose) -> Layout:
    """Returns a layout that knows where its head runs, and says why in `Layout.head`.

    Args:
      layout: As declared. `auto` is placed as `last` is.
      compose: Returns the same model and devices under another declaration, and what is wrong with that.
    """
    if layout.sizes["pipe"] == 1:
        return layout
    if layout.parallel.pipeline.head != "auto":
        return replace(layout, head=f"head: {_WHERE[layout.parallel.pipeline.head]}, as declared")
    last, spread = (_declared(layout.parallel, head) for head in ("last", "spread"))
    other, wrong = None, spread.problems()
    if not wrong:
        other, wrong = compose(spread)
    if wrong or other is None:
        why = f"not spread, because of {wrong[0].got}: {wrong[0].rule}"
    elif splits_lookups(layout):
        why = (
            f"not spread, because of context={layout.sizes['context']}: a loss that looks labels up could not be "
            "compiled; with jp.next_token head='spread' is possible"
        )
    elif not any(_of_head(layout, path, place) for path, place in layout.placements.items()):
        why = "not spread, because no parameter is a head alone (a dim vocab that is not its first)"
    else:
        whole, share = held(layout), held(other)
        if whole - share >= LEAST:
            text = f"head: {_WHERE['spread']}: {show_bytes(share)} of it on each device instead of {show_bytes(whole)}"
            return replace(other, head=text)
        why = f"spread would free {show_bytes(whole - share)} on each device, less than {show_bytes(LEAST)}"
    return replace(layout, parallel=last, head=f"head: {_WHERE['last']}; {why}")


def held(layout: Layout) -> int:
    """Returns the bytes of its head that a device holds while the table runs."""
    places = (place for path, place in layout.placements.items() if _of_head(layout, path, place))
    return sum(HELD * shard_bytes(p.leaf, p.used, layout.sizes) // np.dtype(p.leaf.dtype).itemsize for p in places)


def splits_lookups(layout: Layout) -> bool:
    """Returns whether only a spread head would cut both sequences and what is looked up: see `train/pieces.py`."""
    return layout.sizes["context"] > 1 and layout.sizes["tensor"] == 1


_WHERE = {"last": "on the last stage", "spread": "spread over pipe"}


def _of_head(layout: Layout, path: str, place: Placement) -> bool:
    """Returns whether a parameter makes logits and does nothing else.

    A table whose first dim is `vocab` is looked up: every stage needs it whole, also where it is the head as well.
    """
    table = len(place.names) > 1 and place.names[0] == "vocab"
    return path not in layout.stacked and "vocab" in place.names and not table


def _declared(parallel: Parallel, head: str) -> Parallel:
    return replace(parallel, pipeline=replace(parallel.pipeline, head=head))
