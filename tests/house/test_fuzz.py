"""Whatever is read, a clean result or a `JaxparError`: nothing else is raised, and nothing takes long.

Each reader is given texts made of its own: what it reads in earnest, cut, mixed and scribbled on; and texts of its
words in any order. 150 of each kind in CI; where full tests run, 2,000 for each reader, in equal parts.
"""

import json
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fuzz_texts import HEADERS, PAIRS, VALUES, cells, declared, instructions, layers, scribbled, soup, toml, words
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.hlo.replica_groups import parse_groups, parse_pairs
from jaxpar.hlo.text import parse
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.models.huggingface.config import FAMILIES, SILENT, read_settings
from jaxpar.models.huggingface.safetensors import entries
from jaxpar.partition.chain import load as load_profile
from jaxpar.pipeline.tables.csv import from_csv, to_csv
from jaxpar.pipeline.tables.library import LIBRARY, schedule

TESTS = Path(__file__).parents[1]
JOBS = [path.read_text() for path in sorted((TESTS.parent / "configs").glob("*.toml"))]
PROGRAMS = [text for path in sorted((TESTS / "hlo").glob("*.txt")) if len(text := path.read_text()) < 5200]
PROFILE = (TESTS / "partition" / "pipedream" / "gnmt_large.graph.txt").read_text()
LAYERS = "".join(line + "\n" for line in PROFILE.splitlines() if "\t" not in line)[:2500].rpartition("\n")[0]
TABLE_TEXTS = [to_csv(schedule(name, stages=2, microbatches=4)) for name in sorted(LIBRARY)]


def clean(read, *given):
    """Calls a reader; returns what it read, or None where it refused it as it should."""
    try:
        return read(*given)
    except JaxparError as error:
        problems = error.problems
    assert problems
    for problem in problems:
        assert problem.got.strip(), problem
        assert problem.rule.strip(), problem
        assert problem.fix.strip(), problem
        assert len(str(problem)) < 20_000, "longer than anybody reads"
    return None


def read_job(text, overrides):
    resolved = dumps(loads(text, overrides))
    try:
        again = dumps(loads(resolved))
    except JaxparError as error:  # what a run writes down is read when it goes on
        raise AssertionError(resolved) from error
    assert again == resolved


def read_table(text):
    table = from_csv(text)
    assert from_csv(to_csv(table)) == table


def read_program(text):
    module = parse(text)
    for _, op in module.ops():
        assert op.bytes >= 0
        assert isinstance((op.label, op.callees, op.condition, op.config, module.stack(op)), tuple)
        if groups := op.attribute("replica_groups"):
            clean(parse_groups, groups, module.partitions)
        if pairs := op.attribute("source_target_pairs"):
            clean(parse_pairs, pairs, module.partitions)


HLO = ("HloModule ", "%a = f32[2]{0} ", "add(%a, %b)", "replica_groups={}", "num_partitions=9", "backend_config=")
OVERRIDES = st.builds("{}={}".format, st.sampled_from(PAIRS), words("8", "1f1b", "true") | VALUES.map(toml))
RING = "x,stages=1,microbatches=1,chunks=1,placement=ring\n"
GROUPS = ["{{0,1},{2,3}}", "[2,4]<=[4,2]T(1,0)", "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b':(1)2}"]
TENSORS = (
    '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[1,2],"data_offsets":[8,10]}}'
)
NODE = "node1 -- A -- "


def read_groups(text):
    clean(parse_groups, text, 8)
    clean(parse_pairs, text, 8)


# what reads, and what it is given
READERS = {
    "jobs, scribbled on": (read_job, scribbled(JOBS, words("train", "[parallel]", "steps = ")), []),
    "jobs, of any values": (read_job, declared(), []),
    "jobs, of any words": (read_job, soup("[train]\n", "steps = ", "[[parallel]]\n"), []),
    "overrides": (read_job, st.just(""), st.lists(OVERRIDES | soup("train", "=", ".steps"), max_size=3)),
    "schedules, scribbled on": (
        read_table,
        scribbled(TABLE_TEXTS, words("F0", "B1", "W0'1", "stages=2", "placement=v")),
    ),
    "schedules, of any words": (read_table, soup("F0,", "B0,", RING, "F0,B0\n")),
    "schedules, of any cells": (read_table, cells()),
    "programs, scribbled on": (read_program, scribbled(PROGRAMS, words(*HLO))),
    "programs, of any words": (read_program, st.builds("HloModule x\nENTRY %e {{\n{}\n}}\n".format, soup(*HLO))),
    "programs, of any instructions": (read_program, instructions()),
    "groups": (read_groups, scribbled(GROUPS, words("'a':(2)2", "4", "8", "{}"))),
}
FILES = {
    "profiles, scribbled on": (load_profile, scribbled([LAYERS + "\n\tnode2 -- node4\n"], words(" -- ", NODE))),
    "profiles, of any words": (load_profile, soup(NODE, "\tnode1 -- node1\n", " -- ", "forward_compute_time=1.0")),
    "profiles, of any layers": (load_profile, layers()),
    "weights, of any tensors": (entries, HEADERS),
    "weights, scribbled on": (
        entries,
        scribbled([TENSORS], words('"F32"', '"__metadata__":{}', "[0,8]", "18446744073709551616")),
    ),
}
KNOWN = {*SILENT, "rope_parameters", "rope_scaling", "rope_type", "head_dim", "mlp_bias"}
CONFIG_KEYS = sorted(KNOWN.union(*({*each.keys.values(), *each.only} for each in FAMILIES.values())) - {"model_type"})
WHOLE = [json.loads(path.read_text()) for path in sorted((TESTS / "models" / "huggingface").glob("*/config.json"))]
CONFIGS = st.builds(
    lambda whole, more: whole | more,
    st.sampled_from(WHOLE),
    st.dictionaries(
        st.sampled_from(CONFIG_KEYS),
        st.sampled_from([1, 2, 64, 0, -1, True, None, 1e-5, "silu", {"rope_type": "llama3", "factor": 8.0}]) | VALUES,
        max_size=3,
    ),
)


def often(test, count):
    """Returns a test that runs on so many inputs."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    phases = [phase for phase in Phase if phase is not Phase.explain]
    return settings(max_examples=count, deadline=None, suppress_health_check=quiet, phases=phases, database=None)(test)


FEW, MANY = 150, 2_000


def each(table):
    """Returns each kind of input with a few, every third in every run, and with its part of many for its reader."""
    kinds = Counter(read for read, *_ in table.values())
    marks = [[pytest.mark.slow] * (i % 3 != 2) for i in range(len(table))]
    few = [pytest.param(name, FEW, id=f"{name}-{FEW}", marks=m) for name, m in zip(table, marks, strict=True)]
    parts = {name: -(-MANY // kinds[read]) for name, (read, *_) in table.items()}
    return few + [pytest.param(*part, id=f"{part[0]}-{part[1]}", marks=pytest.mark.full) for part in parts.items()]


@pytest.mark.spread(0)
@pytest.mark.parametrize(("name", "count"), each(READERS))
def test_a_text_is_read_or_refused(name, count):
    read, *parts = READERS[name]
    parts = [part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts]
    often(given(st.tuples(*parts))(lambda given: clean(read, *given)), count)()


@pytest.mark.spread(0)
@pytest.mark.parametrize(("name", "count"), each(FILES))
def test_a_file_is_read_or_refused(name, count, tmp_path):
    read, texts = FILES[name]
    file = tmp_path / "file"

    def one(text):
        data = text.encode("utf-8", "surrogatepass")
        if read is entries:  # a header of the right length, and ten bytes
            data = struct.pack("<Q", len(data)) + data + b"0123456789"
        file.write_bytes(data)
        found = clean(read, file)
        if read is entries:
            for entry in (found or {}).values():
                assert entry.view().nbytes <= 10

    often(given(texts)(one), count)()


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.full)])
def test_a_config_of_any_values_is_read_or_refused(count):
    def one(config):
        clean(read_settings, config)

    often(given(CONFIGS)(one), count)()


def test_what_is_scribbled_on_is_read_before():
    for text in JOBS:
        loads(text)
    for text in TABLE_TEXTS:
        read_table(text)
    for text in PROGRAMS:
        read_program(text)
    assert len(PROGRAMS) >= 8
    assert np.array([len(JOBS), len(TABLE_TEXTS)]).min() >= 8
