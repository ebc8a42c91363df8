"""Where a pipeline runs both ends of a model, embedding and head: on its first and last stage, or on all of them.

    last      every stage holds both ends whole, since one program runs on all of them
    spread    every stage holds its share of `vocab`; what flows into the layers and what comes out of them goes over
              `pipe` for every microbatch, and so do the gradients

While the table runs, a parameter of an end takes `HELD` bytes on a device. `auto` compares these bytes, and takes
`spread` where it frees at least `LEAST` of them and everything that it asks for is there.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxpar.errors import Problem
from jaxpar.parallel.declare import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.pipe import HELD, LEAST
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.units import show_bytes

Compose = Callable[[Parallel], tuple[Layout | None, list[Problem]]]


def placed_head(layout: Layout, compose: Compose) -> Layout:
    """Returns a layout that knows where its ends run, and says why in `Layout.notes`.

    Args:
      layout: As declared. `auto` is placed as `last` is.
      compose: Returns the same model and devices under another declaration, or what is wrong with that.
    """
    if layout.parallel.pipeline.head != "auto":
        return layout.noted(f"head: {_WHERE[layout.parallel.pipeline.head]}, as declared")
    last, spread = (_declared(layout.parallel, head) for head in ("last", "spread"))
    other, wrong = compose(spread)
    if wrong or other is None:
        why = f"not spread, because of {wrong[0].got}: {wrong[0].rule}"
    elif splits_lookups(layout):
        why = (
            f"not spread, because of context={layout.sizes['context']}: a loss that looks labels up could not be "
            "compiled; with jp.next_token head='spread' is possible"
        )
    else:
        whole, share = held(layout), held(other)
        if whole - share >= LEAST:
            size = f"{show_bytes(share)} of embedding and head on each device instead of {show_bytes(whole)}"
            return other.noted(f"head: {_WHERE['spread']}: {size}")
        why = f"spread would free {show_bytes(whole - share)} on each device, less than {show_bytes(LEAST)}"
    return replace(layout, parallel=last).noted(f"head: {_WHERE['last']}; {why}")


def held(layout: Layout) -> int:
    """Returns the bytes of embedding and head, where they have a dim `vocab`, on a device while the table runs."""
    ends = (place for path, place in layout.placements.items() if path not in layout.stacked)
    places = (place for place in ends if {"vocab", "vocab_table"} & {*place.names})
    return sum(HELD * shard_bytes(p.leaf, p.used, layout.sizes) // np.dtype(p.leaf.dtype).itemsize for p in places)


def splits_lookups(layout: Layout) -> bool:
    """Returns whether only a spread head would cut both sequences and what is looked up: see `check_context`."""
    return layout.sizes["context"] > 1 and layout.sizes["tensor"] == 1


_WHERE = {"last": "on the last stage", "spread": "spread over pipe"}


def _declared(parallel: Parallel, head: str) -> Parallel:
    return replace(parallel, pipeline=replace(parallel.pipeline, head=head))
