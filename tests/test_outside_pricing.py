"""What travels is priced at the slowest link that it crosses: held to pairs made by hand, and to measurements."""

from dataclasses import replace

import numpy as np
import pytest
from test_plan_advice import LLAMA_1B, LLAMA_8B, question

from jaxpar.inspector.hlo import parse
from jaxpar.inspector.timeline import replay
from jaxpar.plan.advice import advise
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.hardware import HARDWARE
from jaxpar.plan.practice import JAXPAR_FUSED
from jaxpar.plan.search import search
from jaxpar.plan.traffic import send

H100 = HARDWARE["h100"]

# devices from a stage to the next, stages, devices of a node; (from, to) of one message that crosses, None where
# all stay inside: stage s is on the devices s x stride .. (s + 1) x stride - 1
BOUNDARIES = [
    (4, 2, 8, None),
    (4, 4, 8, (4, 8)),  # 0 -> 4 stays, 4 -> 8 crosses
    (2, 4, 8, None),
    (2, 8, 8, (6, 8)),
    (1, 16, 8, (7, 8)),
    (1, 8, 8, None),
    (8, 2, 8, (0, 8)),
    (3, 3, 8, (5, 8)),  # a node of 8 takes two stages and two thirds of the third
    (1, 72, 72, None),
    (1, 2, 1, (0, 1)),
]


@pytest.mark.parametrize(("stride", "stages", "per_node", "crossing"), BOUNDARIES)
def test_a_tick_is_priced_at_the_slowest_link_that_a_message_of_it_crosses(stride, stages, per_node, crossing):
    if crossing is not None:
        source, target = crossing
        assert target == source + stride < stride * stages
        assert source // per_node != target // per_node
    link = H100.inside if crossing is None else H100.between
    found = send(LLAMA_8B, Candidate(pipe=stages, fsdp=stride), replace(H100, per_node=per_node), JAXPAR_FUSED)
    assert float(found) == pytest.approx(H100.launch + link.latency + 2 * 8192 * 4096 / link.bandwidth)


def test_a_pipeline_whose_stages_share_nodes_waits_for_the_network():
    """Of 3 bytes a second: each step would take years, however many stages a node holds."""
    layouts = Candidate(pipe=16, fsdp=np.array([1, 2, 4, 8]), zero=3, microbatches=64)
    slow = question(LLAMA_8B, 64, between=3.0).hardware
    assert (send(LLAMA_8B, layouts, slow, JAXPAR_FUSED) > 1e6).all()
    assert search(question(LLAMA_8B, 64, between=3.0)).fastest.time.total > 1e6


def test_on_two_nodes_with_a_slow_network_zero_inside_nodes_is_as_good_as_anything():
    """A pipeline of stages that share a node was said to be 46 % faster, its messages priced as inside."""
    advice = advise(search(question(LLAMA_1B, 16, between=5e8)))
    assert advice.agrees
    assert advice.plan.best[0].candidate.pipe == 1


PERMUTE = """HloModule permute, is_scheduled=true, num_partitions=16

ENTRY %main (x: f32[64,1048576]) -> f32[64,1048576] {{
  %x = f32[64,1048576]{{1,0}} parameter(0)
  ROOT %moved = f32[64,1048576]{{1,0}} collective-permute(%x), channel_id=1, source_target_pairs={pairs}
}}
"""
STAGES = [(0, 4), (4, 8), (8, 12)]  # the first device of each of four stages, 4 apart


@pytest.mark.parametrize(
    ("pairs", "crosses"),
    [
        (STAGES, True),
        (STAGES[::-1], True),
        (STAGES[:1], False),
        (STAGES[1:2], True),
        (STAGES[2:], False),
        ([(12, 0)], True),  # the ring's last link
        ([(0, 1), (8, 9)], False),
    ],
)
def test_a_compiled_permute_takes_what_its_slowest_pair_takes(pairs, crosses):
    text = PERMUTE.format(pairs="{" + ",".join(f"{{{a},{b}}}" for a, b in pairs) + "}")
    assert crosses == any(a // 8 != b // 8 for a, b in pairs)
    time = replay(parse(text), {"pipe": 4, "fsdp": 4}, H100.chip, 8)
    rate = H100.chip.network if crosses else H100.chip.nvlink
    assert time.seconds == pytest.approx(64 * 2**20 * 4 / (0.8 * rate), rel=0.02)


GATHER = """HloModule gather, is_scheduled=true, num_partitions=12

ENTRY %main (x: f32[64,1048576]) -> f32[384,1048576] {
  %x = f32[64,1048576]{1,0} parameter(0)
  ROOT %all = f32[384,1048576]{1,0} all-gather(%x), replica_groups={{0,1,2,3,4,5},{6,7,8,9,10,11}}, dimensions={0}
}
"""


def test_a_compiled_collective_takes_what_its_slowest_group_takes():
    """The first group of six is inside a node of eight, the second is on two: three members' ports each way."""
    time = replay(parse(GATHER), {"data": 2, "fsdp": 6}, H100.chip, 8)
    size = 384 * 2**20 * 4
    assert time.seconds == pytest.approx(size * 5 / 6 / (0.8 * 3 * H100.chip.network), rel=0.02)
