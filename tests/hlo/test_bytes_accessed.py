"""The bytes a kernel moves: counted by hand for slices, updates in place, and what needs all of its operands."""

import pytest

from jaxpar.hlo.bytes_accessed import bytes_accessed
from jaxpar.hlo.text import parse

STACK, SLICE, INDEX = 4 * 8 * 1024, 4 * 1024, 4  # f32[8,1024], of which a layer is f32[1,1024]; s32[]
ARGUMENTS = "%stack = f32[8,1024]{1,0} parameter(0)", "%row = f32[1,1024]{1,0} parameter(1)", "%i = s32[] parameter(2)"


def of(*body, kind="fusion", result="f32[8,1024]{1,0}"):
    """The bytes that a fusion moves whose parameters are a stack, a row and an index."""
    inner = "\n".join(f"  {line}" for line in (*ARGUMENTS, "%zero = s32[] constant(0)", *body[:-1], f"ROOT {body[-1]}"))
    outer = "\n".join(f"  {line}" for line in ARGUMENTS)
    call = f"%out = {result} {kind}(%stack, %row, %i), kind=kLoop, calls=%body"
    text = (
        "HloModule by_hand, is_scheduled=true, num_partitions=1\n\n%body (a: f32[8,1024]) -> f32[8,1024] {\n"
        f"{inner}\n}}\n\nENTRY %main (a: f32[8,1024]) -> f32[8,1024] {{\n{outer}\n  ROOT {call}\n}}\n"
    )
    module = parse(text)
    return bytes_accessed(module, "main", module.computations["main"][-1])


TAKE = "%one = f32[1,1024]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,1024}"
ADD = "%sum = f32[1,1024]{1,0} add(%one, %row)"
NEGATE = "%other = f32[8,1024]{1,0} negate(%stack)"
UPDATE = "%new = f32[8,1024]{1,0} dynamic-update-slice(%stack, %row, %i, %zero)"


@pytest.mark.parametrize(
    ("body", "bytes_"),
    [
        ([UPDATE], 2 * SLICE + INDEX),  # the row is read and written
        (["%alias = f32[8,1024]{1,0} bitcast(%stack)", UPDATE.replace("%stack", "%alias")], 2 * SLICE + INDEX),
        ([UPDATE, "%again = f32[8,1024]{1,0} bitcast(%new)"], 2 * SLICE + INDEX),
        ([TAKE], 2 * SLICE + INDEX),
        ([NEGATE], 2 * STACK),
        ([NEGATE, UPDATE.replace("(%stack", "(%other")], STACK + 2 * SLICE + INDEX),
        ([TAKE, ADD, UPDATE.replace("%row", "%sum")], 3 * SLICE + INDEX),
    ],
    ids=["update", "through a name", "under a name", "slice", "all", "not in place", "add to a slice"],
)
@pytest.mark.parametrize("kind", ["fusion", "fusion-start"])
def test_bytes_are_those_that_are_touched(body, bytes_, kind):
    assert of(*body, kind=kind) == bytes_
