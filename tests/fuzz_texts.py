"""Texts for the fuzzer: of what a reader reads in earnest, scribbled on, and of its own words in any order."""

import json
from string import printable

from hypothesis import strategies as st

from jaxpar.job.file.schema import SECTIONS, TABLES

ODD = [
    "", "\0", "\n", "\r\n", "\t", '"', "'", '"""', "[", "]", "{", "}", "(", ")", "=", ",", ".", "-", "%", "#", "\\",
    "é", "٣", "\ud7ff", "\ufeff", "😀", "0", "-1", "1e999", "nan", "inf", "9" * 25, "9" * 5000, "0x1F", "1979-05-27",
    "true", "{{0,1}}", "<=[8]", "T(1,0)", "ROOT ", "ENTRY ", "}", "f32[", "f32[2,<=3]{1,0}", "mesh['a'=2]", "[" * 300,
    "[" * 3000, "{a=" * 300,
]  # fmt: skip


@st.composite
def scribbled(draw, texts, words):
    """Returns one of the texts after a few edits: pieces gone, doubled, moved, or overwritten with words."""
    text = draw(st.sampled_from(texts))
    low = draw(
        st.sampled_from([0, *[text.find("\n") + 1] * 4])
    )  # seldom in the first line, which often says what it is
    for _ in range(draw(st.integers(1, 4))):
        a, b = (draw(st.integers(min(low, len(text)), len(text))) for _ in range(2))
        a, b = min(a, b), min(max(a, b), min(a, b) + draw(st.sampled_from([0, 1, 3, 20, 200])))
        kind = draw(st.integers(0, 4))
        piece = draw(words) if kind > 1 else text[a:b] if kind else ""
        if kind == 4:  # in the place of a word, so that what is around it stays readable
            start = max(text.rfind(" ", 0, a), text.rfind("=", 0, a), text.rfind(",", 0, a)) + 1
            ends = [at for at in (text.find(end, a) for end in ",\n )}]") if at >= 0]
            a, b = start, min(ends, default=len(text))
        text = text[:a] + piece + text[b if kind != 1 else a :]
    return text


def words(*more):
    return st.sampled_from([*ODD, *more]) | st.text(st.sampled_from(printable + "éλ\0\x85\u2028"), max_size=6)


def soup(*more):
    return st.lists(words(*more), max_size=30).map("".join)


KEYS = sorted({key for table in TABLES.values() for key in table.__dataclass_fields__} | set(SECTIONS))
PAIRS = [f"{section}.{key}" for section, table in TABLES.items() for key in table.__dataclass_fields__]
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["", "auto", "h100:1x8", "1f1b"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def toml(value):
    """Returns a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value) if isinstance(value, (int, float)) else _quoted("" if value is None else value)


def _quoted(text):
    return '"' + "".join(f"\\U{ord(char):08x}" for char in text if not 0xD800 <= ord(char) < 0xE000) + '"'


@st.composite
def declared(draw):
    """Returns a job of sections and keys that there are, with any values."""
    lines = []
    for section in draw(st.lists(st.sampled_from(sorted([*TABLES, "model"])), max_size=3, unique=True)):
        keys = (
            sorted(TABLES[section].__dataclass_fields__) if section in TABLES else ["name", "dim", "own", "a key", "é"]
        )
        table = draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=3))
        lines += [f"[{section}]", *(f"{_quoted(key)} = {toml(value)}" for key, value in table.items())]
    return "\n".join(lines)


@st.composite
def cells(draw):
    """Returns a table of the right shape, of any cells."""
    stages, microbatches, chunks = (draw(st.integers(1, 2)) for _ in range(3))
    one = st.builds(
        "{}{}'{}".format, st.sampled_from("FFBBW"), st.integers(0, microbatches), st.integers(0, chunks - 1)
    )
    ticks = draw(st.integers(1, 6))
    rows = [",".join(draw(one | st.just(".")) for _ in range(ticks)) for _ in range(stages)]
    head = f"x,stages={stages},microbatches={microbatches},chunks={chunks},placement="
    return "\n".join([head + draw(st.sampled_from(["ring", "v"])), *rows])


NAMES, TYPES = (
    st.sampled_from("abc"),
    ["f32[2]{0}", "(f32[2], s32[])", "pred[]", "x9[1]", "()", "bf16[<=4,2]{1,0}", "token[]"],
)
OPS = ["add", "parameter", "constant", "while", "fusion", "all-gather-start", "all-reduce", "tuple", "custom-call"]
EXTRAS = [
    "replica_groups={{0,1}}", "replica_groups=[1,2]<=[2]", "calls=%b", "condition=%a, body=%b", "to_apply=%e",
    'sharding={', 'backend_config={"a":[1]}', 'backend_config={"', 'metadata={op_name="a\\"b" stack_frame_id=1}',
    "branch_computations={%a}", "source_target_pairs={{0,1}}", 'metadata={source_file="x" source_line=3}',
]  # fmt: skip


@st.composite
def instructions(draw):
    """Returns a program of one to three computations, of any instructions."""
    lines = [draw(st.sampled_from(["HloModule x, num_partitions=2", "HloModule x", "HloModule x, is_scheduled=true"]))]
    for name in [*draw(st.lists(NAMES, max_size=2, unique=True)), "e"]:
        lines.append(("ENTRY " if name == "e" else "") + f"%{name} (p: f32[2]) -> f32[2] {{")
        count = draw(st.integers(1, 4))
        for at in range(count):
            kind, made = draw(st.sampled_from(OPS)), draw(st.sampled_from(TYPES))
            inside = "0" if kind == "parameter" else ", ".join(f"%{x}" for x in draw(st.lists(NAMES, max_size=2)))
            extra = "".join(f", {each}" for each in draw(st.lists(st.sampled_from(EXTRAS), max_size=2)))
            lines.append(f"  {'ROOT ' * (at == count - 1)}%{'abcd'[at]} = {made} {kind}({inside}){extra}")
        lines.append("}")
    return "\n".join([*lines, ""])


@st.composite
def layers(draw):
    """Returns a profile of any layers and edges."""
    number = st.sampled_from(["0", "1.5", "1e9", "9" * 18, "9" * 19, "-1", ""])
    names, lines = [f"node{i}" for i in range(draw(st.integers(1, 4)))], []
    for name in names:
        sizes = draw(number | st.just("[1.0; 2.0]"))
        costs = (
            f"forward_compute_time={draw(number)}, backward_compute_time=1, activation_size={sizes}, parameter_size=1"
        )
        lines.append(f"{name} -- {draw(st.sampled_from(['A', 'Input0', 'B -- C']))} -- {costs}")
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    return "\n".join([*lines, *(f"\t{a} -- {b}" for a, b in draw(st.lists(pairs, max_size=4)))])


TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "I64", "X", "F8_E4M3"]),
        "shape": st.lists(st.integers(-1, 3) | st.sampled_from([2**63, 2**31, 1.0, True]), max_size=3),
        "data_offsets": st.sampled_from(
            [[0, 0], [0, 2], [2, 10], [0, 10], [0, 8], [8, 10], [10, 10], [2**64, 2**64 + 4]]
        ),
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "\ud800"]), TENSOR, max_size=3).map(json.dumps)
