"""Where a pipeline runs both ends of a model, embedding and head: on its first and last stage, or on all of them.

    last      every stage holds both ends whole, since one program runs on all of them
    spread    every stage holds its shard of `vocab`; the input and the output of the layers go over `pipe` for every
              microbatch, and so do their gradients

While the table runs, a parameter of an end takes `HELD` bytes on a device. `auto` compares these bytes, and takes
`spread` where it frees at least `LEAST` of them and all its requirements are met.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxpar.errors import Problem
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout, with_note
from jaxpar.parallel.pipeline_options import HELD, LEAST
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.units import show_bytes

Compose = Callable[[Parallel], tuple[Layout | None, list[Problem]]]


def place_head(layout: Layout, compose: Compose) -> Layout:
    """Decides where the ends of the model run, and says why in `Layout.notes`.

    Args:
      layout: As declared. `auto` is placed as `last` is.
      compose: Composes the same model and devices under another declaration; returns the layout, or its problems.
    """
    if layout.parallel.pipeline.head != "auto":
        return with_note(layout, f"head: {_WHERE[layout.parallel.pipeline.head]}, as declared")
    last, spread = (_declared(layout.parallel, head) for head in ("last", "spread"))
    spread_layout, problems = compose(spread)
    if problems or spread_layout is None:
        why = f"not spread, because of {problems[0].got}: {problems[0].rule}"
    elif splits_lookups(layout):
        why = (
            f"not spread, because of context={layout.sizes['context']}: a loss that looks labels up could not be "
            "compiled; with jp.next_token_loss head='spread' is possible"
        )
    else:
        whole, share = head_bytes(layout), head_bytes(spread_layout)
        if whole - share >= LEAST:
            size = f"{show_bytes(share)} of embedding and head on each device instead of {show_bytes(whole)}"
            return with_note(spread_layout, f"head: {_WHERE['spread']}: {size}")
        why = f"spread would free {show_bytes(whole - share)} on each device, less than {show_bytes(LEAST)}"
    return with_note(replace(layout, parallel=last), f"head: {_WHERE['last']}; {why}")


def head_bytes(layout: Layout) -> int:
    """Bytes of embedding and head (parameters with a dim `vocab`) on a device while the table runs."""
    ends = (place for path, place in layout.placements.items() if path not in layout.stacked_paths)
    places = (place for place in ends if {"vocab", "vocab_table"} & {*place.names})
    return sum(HELD * shard_bytes(p.leaf, p.used, layout.sizes) // np.dtype(p.leaf.dtype).itemsize for p in places)


def splits_lookups(layout: Layout) -> bool:
    """Whether only a spread head would split sequences and lookup tables: see `techniques.context.tables_in_pieces`."""
    return layout.sizes["context"] > 1 and layout.sizes["tensor"] == 1


_WHERE = {"last": "on the last stage", "spread": "spread over pipe"}


def _declared(parallel: Parallel, head: str) -> Parallel:
    return replace(parallel, pipeline=replace(parallel.pipeline, head=head))
