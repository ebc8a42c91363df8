"""Bare models as they were published send no more and need no more memory than by the best rules an expert writes.

Specs alone say this where `tensor` divides all that it cuts (`test_unannotated_models`); here programs are compiled.
"""

from importlib.metadata import version
from itertools import product

import pytest
from unannotated import NAMES
from unannotated_compiled import WAYS, ways

from jaxpar.errors import JaxparError
from jaxpar.mesh.target import missing_plugin

pytestmark = [
    pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}"),
    pytest.mark.slow,
]
LAYOUTS = [
    ("h100:1x8", (("tensor", 8),)),
    ("h100:1x8", (("data", 2), ("fsdp", 2), ("tensor", 2))),
    ("h100:8x8", (("fsdp", 8), ("tensor", 8))),
]
QUICK = "GPT2", LAYOUTS[-1]  # a vocabulary that no layout divides
TILES = pytest.mark.xfail(
    version("jaxlib") < "0.11", raises=JaxparError, reason="without autotuning XLA 0.10 has no tiles for 197 x 4 rows"
)


def marks(name, layout):
    return [pytest.mark.full] * ((name, layout) != QUICK) + [TILES] * (name == "ViT")


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=marks(*case)) for case in product(NAMES, LAYOUTS)],
    ids=str,
)
def test_what_is_chosen_needs_no_more_than_what_an_expert_writes(name, layout):
    # of a table that is left whole every device of tensor computes all logits: no expert wants that
    chosen, *experts = ways(name, *layout, odd=WAYS[3:]).values()
    assert chosen.wire <= 1.05 * min(each.wire for each in experts)
    assert chosen.memory <= 1.05 * min(each.memory for each in experts)
