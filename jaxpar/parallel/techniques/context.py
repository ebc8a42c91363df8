"""Context parallelism: devices share every sequence, and attention brings its queries and keys together.

To add a way of doing that: a file beside `attention_gather.py` with a function of the arguments of `jp.attention`, and
a row of `HOW`. It is chosen by `Parallel(how={"context": name})`.
"""

from typing import Any

from jaxpar.errors import refuse
from jaxpar.parallel.declare import Axes, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.attention_gather import gather
from jaxpar.parallel.techniques.base import Technique

HOW = {"gather": {"attention": gather}}
_PICKS = "operand_batching_dims"  # a lookup of its own in every row, as in take_along_axis


def names(parallel: Parallel) -> dict[str, Axes]:
    """Returns the axes of a sequence: `tensor` too with sequence parallelism, where no name before it took the axis."""
    return {"seq": ("context", *["tensor"] * parallel.sequence)}


def tables_in_pieces(layout: Layout) -> bool:
    """Returns whether a pipeline splits sequences over one axis, and what they look things up in over another."""
    spread = layout.parallel.pipeline.head == "spread"  # the vocabulary is then split over `pipe`
    return layout.sizes["pipe"] > 1 < layout.sizes["context"] and (layout.sizes["tensor"] > 1 or spread)


def check(layout: Layout, named: set[str], lowered: Any) -> None:
    """Refuses a context axis where nothing is split over it, or where XLA can't split what is.

    Raises:
      JaxparError: If no dim is called seq; or if a pipeline whose sequences and vocabulary are both in pieces looks up
        an entry per row, on which XLA 0.10 to 0.12 ends the process.
    """
    sizes, name = layout.sizes, layout.blueprint.name
    if sizes["context"] == 1:
        return
    if "seq" not in named:
        raise refuse(
            f"context={sizes['context']}, but {name} names no activation dim seq",
            rule="context parallelism splits the dim that is called seq; else its devices all do the same work",
            fix='jp.constrain(x, "batch", "seq", "embed") on the stream, or context=1',
        )
    if tables_in_pieces(layout) and _PICKS in lowered.as_text():
        over = "tensor" if sizes["tensor"] > 1 else "pipe"
        head = "" if over == "tensor" else ", head='spread'"
        raise refuse(
            f"take_along_axis in {name} or its loss, on pipe={sizes['pipe']} x context={sizes['context']} x "
            f"tensor={sizes['tensor']}{head}",
            rule=f"inside of a pipeline XLA picks no entry per row out of what is split over context and {over}: it "
            "ends the process",
            fix="a sum over the entries that compares each with the label, as jp.next_token does; or pipe=1, context=1 "
            "or " + ("tensor=1" if over == "tensor" else "head='last'"),
        )


CONTEXT = Technique(axis="context", names=names, check=check, how=HOW)
