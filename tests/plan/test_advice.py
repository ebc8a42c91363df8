"""The published decision table as data: every row fires on its case, and the cost model stands beside it."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pairwise import some

from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.plan.decision_table import RULES, Situation, advise, find_situation
from jaxpar.plan.enumeration import legal_layouts
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.search import MARGIN, Question, search

H100 = HARDWARE["h100"]
LLAMA_1B = Shape(layers=16, dim=2048, heads=32, kv_heads=8, hidden=8192, vocab=128256, seq=4096, gated=True)
LLAMA_8B = Shape(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=8192, gated=True)
LLAMA_70B = Shape(layers=80, dim=8192, heads=64, kv_heads=8, hidden=28672, vocab=128256, seq=8192, gated=True)
WIDE = replace(LLAMA_8B, layers=2)  # its embedding is its largest layer
JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")


def question(shape, devices, rows=64, *, memory=0, **bandwidths):
    links = {key: replace(getattr(H100, key), bandwidth=rate) for key, rate in bandwidths.items()}
    return Question(
        model=Transformer(shape=shape),
        devices=devices,
        rows=rows,
        hardware=replace(H100, **links),
        software=JAXPAR_FUSED,
        memory=memory,
    )


# nodes, what fits, links: the cells of the table, and the two for a layer that is too large
CELLS = [
    (question(LLAMA_1B, 8), ("one", "device", "fast"), "DDP, or ZeRO"),
    (question(LLAMA_1B, 8, inside=20e9), ("one", "device", "slow"), "DDP, or ZeRO"),
    (question(LLAMA_8B, 8), ("one", "node", "fast"), "PP, ZeRO or TP"),
    (question(LLAMA_8B, 8, inside=20e9), ("one", "node", "slow"), "PP: without NVLink"),
    (question(LLAMA_8B, 64), ("several", "node", "fast"), "ZeRO, which leaves"),
    (question(LLAMA_70B, 64), ("several", "more", "fast"), "ZeRO, which leaves"),
    (question(LLAMA_8B, 64, between=3e9), ("several", "node", "slow"), "ZeRO over the links inside"),
    (question(LLAMA_70B, 64, 128, between=3e9), ("several", "more", "slow"), "DP + PP + TP + ZeRO-1"),
    (question(WIDE, 8, memory=6 * 10**9), ("one", "layer", "fast"), "TP, because with PP alone"),
    (question(WIDE, 16, memory=6 * 10**9, between=3e9), ("several", "layer", "slow"), "DP + PP + TP + ZeRO-1"),
]


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("asked", "cell", "said"),
    some(CELLS, [CELLS[3]], [CELLS[0], CELLS[1], CELLS[2], CELLS[5], CELLS[6], CELLS[7], CELLS[8], CELLS[9]]),
    ids=["-".join(cell) for _, cell, _ in CELLS],
)
def test_a_cell_of_the_table(asked, cell, said):
    situation = find_situation(asked)
    assert (situation.nodes, situation.model, situation.links) == cell
    advice = advise(search(asked))
    assert advice.rule.advice.startswith(said)
    assert advice.rule.fires(situation)
    for option in advice.options:
        if option.best is not None:
            assert option.best.memory.total <= asked.memory_limit
            one = option.best.candidate.map_fields(lambda value: np.array([value]))
            assert option.layouts.mask(one, 8).all()


@pytest.mark.nightly
def test_every_row_has_its_case_and_every_situation_exactly_one_row():
    fired = {id(advise(search(asked)).rule) for asked, _, _ in CELLS}
    assert fired == {id(rule) for rule in RULES}
    for nodes, model, links in product(("one", "several"), ("device", "node", "more", "layer"), ("fast", "slow")):
        assert sum(rule.fires(Situation(nodes=nodes, model=model, links=links)) for rule in RULES) == 1


@pytest.mark.nightly
def test_an_option_is_the_fastest_of_its_kind_that_fits():
    advice = advise(search(question(LLAMA_8B, 8)))
    plan = search(question(LLAMA_8B, 8), top=1000)
    zero = next(option.best for option in advice.options if option.layouts.name == "ZeRO")
    same = [each for each in plan.best if each.candidate.fsdp == 8]
    assert zero.time.total == min(each.time.total for each in same)


def test_no_pipeline_inside_one_nvlink_domain_though_the_table_calls_it_on_a_par():
    advice = advise(search(question(LLAMA_8B, 8)))
    assert {option.layouts.name for option in advice.options} == {"PP", "ZeRO", "TP"}
    assert advice.recommended.candidate.pipe == 1
    assert advice.plan.best[0].candidate.pipe == 1
    assert advice.agrees
    pipeline = next(option.best for option in advice.options if option.layouts.name == "PP")
    assert pipeline.time.total > (1 + MARGIN) * advice.recommended.time.total


@pytest.mark.nightly
def test_slow_links_between_nodes_want_a_pipeline():
    advice = advise(search(question(LLAMA_70B, 64, 128, between=3e9)))
    own, first = advice.recommended, advice.plan.best[0]
    assert own.candidate.pipe > 1 < first.candidate.pipe
    # inside of a node; whether stages share one, and how many there are, is a matter of less than a plan can tell apart
    assert own.candidate.tensor == 8
    assert 2 <= first.candidate.tensor <= 8
    assert own.time.total <= (1 + advice.plan.question.margin) * first.time.total


@pytest.mark.nightly
def test_where_they_differ_it_says_by_how_much_and_why():
    advice = advise(search(question(LLAMA_8B, 64, between=5e8)))
    assert not advice.agrees
    first, own = advice.plan.best[0], advice.recommended
    assert advice.gap == own.time.total / first.time.total - 1 > advice.plan.question.margin
    assert re.search(rf"they differ: .*takes \+{advice.gap:.1%}, sharding \+", advice.verdict)


@pytest.mark.nightly
def test_what_does_not_fit_is_named_with_what_it_needs():
    advice = advise(search(question(LLAMA_8B, 8, memory=220 * 10**8)))
    said = {option.layouts.name: option.why for option in advice.options}
    assert re.match(r"does not fit: the leanest, pipe 8, .* needs .*GiB", said["PP"])
    assert said["TP"] == ""
    seven = advise(search(question(replace(LLAMA_1B, layers=14), 7, 7)))
    assert seven.recommended is not None
    wide = advise(search(question(replace(LLAMA_8B, layers=1), 8, inside=20e9, memory=20 * 10**9)))
    assert wide.options[0].why.startswith("is not possible")
    assert wide.recommended is None
    assert wide.gap == np.inf
    assert "nothing that the table names fits" in str(wide)


def test_what_fits_nowhere_is_refused_before_any_advice():
    with pytest.raises(JaxparError, match="none of"):
        advise(search(question(LLAMA_70B, 8)))


def test_tensor_parallelism_stays_in_a_node():
    every = legal_layouts(LLAMA_70B, devices=64, rows=64)
    for rule in RULES:
        for layouts in rule.layouts:
            assert every.tensor[layouts.mask(every, 4)].max(initial=1) <= 4
            if layouts.local:
                assert every.fsdp[layouts.mask(every, 4)].max() == 4


@pytest.mark.nightly
def test_the_verb_prints_it_and_writes_it_as_json(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["plan", JOB, "--devices", "8", "--attention", "fused", "--top", "1"]
    assert main([*words, "--advise", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "The published decision table: PP, ZeRO or TP" in said
    found = json.loads(out.read_text())["advice"]
    assert found["situation"]["model"] == "node"
    assert [option["name"] for option in found["options"]] == ["PP", "ZeRO", "TP"]
    assert found["recommended"]["how"] == "modelled"
    assert found["verdict"] in said
    assert main([*words, "--json", str(out)]) == 0
    assert "advice" not in json.loads(out.read_text())
