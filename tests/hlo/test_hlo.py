"""What XLA prints is read as it stands: each syntax of two releases, by numbers counted by hand; garbage is refused.

hlo/*.txt are texts that XLA printed, of the programs in hlo/model.py on a mesh data=2 x tensor=4.
"""

import math
import re
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.hlo.attribution import ArrayCauses
from jaxpar.hlo.flop import forward_flop, hardware_flop
from jaxpar.hlo.replica_groups import axes_of_groups, axes_of_pairs, parse_groups, parse_pairs
from jaxpar.hlo.text import BITS, HloArray, SourceFrame, arrays, parse
from jaxpar.hlo.trip_counts import trip_count, walk
from jaxpar.inspector.ledger import collectives
from jaxpar.mesh.collective import KINDS, wire_bytes
from jaxpar.mesh.target import missing_plugin, parse_target

HERE = Path(__file__).parent
TEXTS = {path.stem: path.read_text() for path in sorted(HERE.glob("*.txt"))}
SIZES = {"data": 2, "tensor": 4}
RELEASES = ("gpu_0.10.2", "gpu_0.12.0.1")
ADD = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
every_release = pytest.mark.parametrize("release", RELEASES)
compiler = pytest.mark.skipif(missing_plugin() is not None, reason="needs jax-cuda13-pjrt")


def program(*lines, partitions=8, above=ADD):
    """A module of which the entry's parameter is %p and these are the other lines, the last of them its root."""
    body = "\n".join(f"  {line}" for line in ("%p = f32[8,16]{1,0} parameter(0)", *lines[:-1], f"ROOT {lines[-1]}"))
    head = f"HloModule by_hand, is_scheduled=true, num_partitions={partitions}"
    return f"{head}\n\n{above}\nENTRY %main (p: f32[8,16]) -> f32[8,16] {{\n{body}\n}}\n"


def only(line, **settings):
    """The last instruction of such a module."""
    return parse(program(line, **settings)).computations["main"][-1]


def sent(text, sizes=SIZES):
    return collectives(parse(text), sizes, ArrayCauses(()))


def members(groups):
    return {frozenset(row) for row in groups.tolist()}


def refused(error, *words):
    """Asserts that an error says these words, in one problem with a rule and a fix."""
    (problem,) = error.value.problems
    assert problem.got
    assert problem.rule
    assert problem.fix
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in:\n{error.value}"


# ---- instructions


@pytest.mark.parametrize("name", TEXTS)
def test_every_line_of_a_saved_text_is_read(name):
    module = parse(TEXTS[name])
    assert module.partitions == 8
    assert module.scheduled
    assert module.name == TEXTS[name].split()[1].rstrip(",")
    assert module.entry == re.search(r"^ENTRY %(\S+)", TEXTS[name], re.M)[1]
    assert sum(1 for _ in module.ops()) == len(re.findall(r"^  (?:ROOT )?%\S+ = ", TEXTS[name], re.M))
    assert all(op.opcode for _, op in module.ops())


@pytest.mark.parametrize("name", TEXTS)
def test_no_path_of_a_machine_is_in_a_saved_text(name):
    assert not re.search(r"/(work|tmp|home|usr)/", TEXTS[name])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("f32[]", ["f32[]"]),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(5)}", ["bf16[8,128]"]),
        ("(f32[2]{0}, s32[])", ["f32[2]", "s32[]"]),
        ("((f32[2]{0}, f32[3]{0}), (f32[16]{0}, f32[24]{0}))", ["f32[2]", "f32[3]", "f32[16]", "f32[24]"]),
        ("(pred[], u8[4]{0}, /*index=5*/s4[3]{0:E(4)})", ["pred[]", "u8[4]", "s4[3]"]),
        ("(token[], opaque[], f32[1]{0})", ["token[]", "opaque[]", "f32[1]"]),
        ("f32[<=8,16]{1,0}", ["f32[8,16]"]),
        ("()", []),
    ],
)
def test_a_type_is_its_arrays_in_order(text, want):
    assert [str(array) for array in arrays(text)] == want
    assert [str(array) for array in only(f"%x = {text} custom-call(%p)").arrays] == want


@pytest.mark.parametrize(
    ("array", "size"),
    [
        (HloArray("bf16", (3, 5)), 30),
        (HloArray("pred", (3, 5)), 15),
        (HloArray("f8e4m3fn", (3, 5)), 15),
        (HloArray("s4", (3, 5)), 8),
        (HloArray("c64", (3, 5)), 120),
        (HloArray("f64", ()), 8),
        (HloArray("f32", (0, 5)), 0),
        (HloArray("token", ()), 0),
    ],
)
def test_an_array_has_the_bytes_of_its_dtype(array, size):
    assert array.bytes == size


@pytest.mark.parametrize("dtype", [name for name in dir(jnp) if re.fullmatch(r"(bfloat16|u?int\d+|float\d+\w*)", name)])
def test_every_dtype_of_jax_is_known(dtype):
    short = dtype.replace("float", "f").replace("uint", "u").replace("int", "s").replace("_", "")
    assert short in BITS or dtype in ("int1", "uint1")  # XLA compiles these to pred, or not at all


def test_combined_collectives_have_every_operand_and_result():
    start, done = parse(TEXTS["gathered_gpu_0.10.2"]).computations["main.0_spmd"][-2:]
    assert start.operands == ("param", "param.1", "param.2", "param.3", "param.4", "param.5")
    widths = range(16, 22)
    assert [array.dims for array in start.arrays] == [(32, i) for i in widths] + [(64, i) for i in widths]
    assert [array.dims for array in done.arrays] == [(64, i) for i in widths]
    assert done.root


@every_release
def test_quotes_in_a_label_are_the_users_and_call_nothing(release):
    module = parse(TEXTS[f"named_{release}"])
    (found,) = [op for _, op in module.ops() if op.opcode in ("all-reduce", "all-reduce-start")]
    assert found.label == 'jit(named)/shard_map/a "quoted" scope, body=%gone/psum'
    assert found.callees == ("region_0.0",)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ('{"known_trip_count":{"n":"3"},"x":[{"y":"}"}]}, metadata={op_name="z"}', {"n": "3"}),
        ('"opaque \\"text\\" {"', None),
        ("{not json", None),
        ("[1]", None),
    ],
)
def test_a_backend_config_is_read_where_it_is_json(config, want):
    config = only(f"%x = f32[] custom-call(%p), backend_config={config}").config
    assert config.get("known_trip_count") == want


@pytest.mark.parametrize("inside", ["{ {1, 2}, {3, -4} }", '"a ) \\" %b ("', "-inf", "{...}"])
def test_a_constant_is_no_operand(inside):
    op = only(f'%x = f32[2,2]{{1,0}} constant({inside}), metadata={{op_name="c"}}')
    assert (op.operands, op.operand_text, op.label) == ((), inside, "c")


def test_operands_may_have_types_and_names_no_percent():
    long = only("%x = f32[8,16]{1,0} add(f32[8,16]{1,0} %p, f32[8,16]{1,0} %p)")
    text = "HloModule m\n\nENTRY main {\n  a = f32[2]{0} parameter(0)\n  ROOT b = f32[2]{0} add(a, a)\n}\n"
    short = parse(text).computations["main"][-1]
    assert (long.operands, short.operands) == (("p", "p"), ("a", "a"))


def test_a_computation_may_name_its_thread():
    above = ADD.rstrip() + ', execution_thread="host"\n'
    assert parse(program("%x = f32[] call(%p, %p), to_apply=%add", above=above)).computations["add"][-1].opcode == "add"


# ---- the lines of Python that made them


@every_release
def test_a_stack_goes_from_the_line_to_its_callers(release):
    module = parse(TEXTS[f"kinds_{release}"])
    source = (HERE / "model.py").read_text().splitlines()
    (op,) = [
        op
        for _, op in module.ops()
        if op.opcode.startswith("all-gather") and op.callees == () and "done" not in op.opcode
    ]
    stack = module.stack(op)
    assert [frame.function for frame in stack] == ["kinds", "save", "main", "<module>"]
    assert {frame.file for frame in stack} == {"model.py"}
    assert 'all_gather(y, "data", tiled=True)' in source[stack[0].line - 1]
    assert ".lower(*given)" in source[stack[1].line - 1]


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ('op_name="f" source_file="model.py" source_line=12', [SourceFrame("model.py", 12, "")]),
        ('op_name="f" source_file="model.py" source_end_line=9 source_line=7', [SourceFrame("model.py", 7, "")]),
        ('op_name="f" source_file="model.py"', [SourceFrame("model.py", 0, "")]),
        ('op_name="f" stack_frame_id=7', []),
        ('op_name="f"', []),
    ],
)
def test_an_instruction_may_bear_its_line_itself(metadata, want):
    module = parse(program(f"%x = f32[8,16]{{1,0}} negate(%p), metadata={{{metadata}}}"))
    assert module.stack(module.computations["main"][-1]) == want


# ---- how often they run


@pytest.mark.parametrize("release", [*RELEASES, "cpu_0.12.0.1"])
def test_loops_multiply_and_what_depends_on_data_is_unknown(release):
    found = {(entry.axis, entry.loop): entry.times for entry in sent(TEXTS[f"loops_{release}"])}
    assert found == {
        ("tensor", (3, 5)): 15,
        ("data", (3,)): 3,
        ("tensor", ()): 1,  # in a branch, counted as taken
        ("data", (None,)): None,
        ("data,tensor", (None,)): None,  # in the condition of the while
    }


@every_release
def test_a_branch_is_said_to_be_one(release):
    found = [
        visit for visit in walk(parse(TEXTS[f"loops_{release}"])) if visit.op.opcode.removesuffix("-start") in KINDS
    ]
    assert [visit.times for visit in found if visit.branch] == [1]


def test_every_branch_is_counted_and_the_reducer_is_not():
    branch = """\
%{0} (x: f32[8,16]) -> f32[8,16] {{
  %x{0} = f32[8,16]{{1,0}} parameter(0)
  ROOT %sum{0} = f32[8,16]{{1,0}} all-reduce(%x{0}), replica_groups={{}}, to_apply=%add
}}
"""
    text = program(
        "%which = s32[] constant(0)",
        "%y = f32[8,16]{1,0} conditional(%which, %p, %p), branch_computations={%one, %other}",
        above=ADD + branch.format("one") + branch.format("other"),
    )
    visits = list(walk(parse(text)))
    assert [visit.computation for visit in visits if visit.op.opcode == "all-reduce"] == ["one", "other"]
    assert not [visit for visit in visits if visit.computation == "add"]
    assert [(entry.times, entry.axis) for entry in sent(text)] == [(2, "data,tensor")]


@pytest.mark.parametrize("known", ["{}", '{"n":"many"}', '"5"', "[5]", '{"n":null}'])
def test_a_trip_count_is_read_or_unknown_never_guessed(known):
    assert trip_count(only(f'%x = f32[] custom-call(%p), backend_config={{"known_trip_count":{known}}}')) is None


def test_a_condition_is_asked_once_more_than_the_loop_turns():
    above = """\
%body (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %one = f32[] all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add
}
%more (y: f32[]) -> pred[] {
  %y = f32[] parameter(0)
  %all = f32[] all-reduce(%y), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %less = pred[] compare(%all, %y), direction=LT
}
"""
    loop = "%w = f32[] while(%c), condition=%more, body=%body"
    text = program(
        "%c = f32[] constant(0)", loop + ', backend_config={"known_trip_count":{"n":"6"}}', above=ADD + above
    )
    assert {entry.axis: entry.times for entry in sent(text)} == {"data,tensor": 6, "tensor": 7}


WRAPPED = """\
%wrapped (x: f32[8,16]) -> f32[1,16] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %rs = f32[1,16]{1,0} reduce-scatter(%x), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
"""
IS_SYNC = ', backend_config={"collective_backend_config":{"is_sync":true}}'


@pytest.mark.parametrize(("config", "asynchronous"), [("", True), (IS_SYNC, False)])
def test_what_is_started_is_asynchronous_unless_it_says_it_is_not(config, asynchronous):
    text = program(
        f"%start = ((f32[8,16]{{1,0}}), f32[1,16]{{1,0}}, s32[]) async-start(%p), calls=%wrapped{config}",
        "%update = ((f32[8,16]{1,0}), f32[1,16]{1,0}, s32[]) async-update(%start), calls=%wrapped",
        "%done = f32[1,16]{1,0} async-done(%update), calls=%wrapped",
        above=ADD + WRAPPED,
    )
    (entry,) = sent(text)
    assert (entry.kind, entry.payload, entry.times, entry.asynchronous) == ("reduce-scatter", 512, 1, asynchronous)


def test_what_is_done_sends_nothing_and_what_is_not_started_waits():
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add"
    pair = [
        f"%s = f32[8,16]{{1,0}} all-reduce-start(%p), {groups}",
        f"%d = f32[8,16]{{1,0}} all-reduce-done(%s), {groups}",
    ]
    plain = f"%x = f32[8,16]{{1,0}} all-reduce(%p), {groups}"
    (started,), (whole,) = sent(program(*pair)), sent(program(plain))
    assert (started.payload, started.asynchronous, whole.payload, whole.asynchronous) == (512, True, 512, False)


# ---- who talks to whom


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{{0,1},{2,3}}", {(0, 1), (2, 3)}),
        ("{{0,2}, {1,3}}", {(0, 2), (1, 3)}),
        ("{{0,1,2,3,4,5,6},{7}}", {(0, 1, 2, 3, 4, 5, 6), (7,)}),
        ("{{0},{1,2}}", {(0,), (1, 2)}),
        ("{}", {(0, 1, 2, 3, 4, 5, 6, 7)}),
        ("[2,4]<=[8]", {(0, 1, 2, 3), (4, 5, 6, 7)}),
        ("[2,4]<=[4,2]T(1,0)", {(0, 2, 4, 6), (1, 3, 5, 7)}),
        ("[4,2]<=[2,2,2]T(0,2,1)", {(0, 2), (1, 3), (4, 6), (5, 7)}),
        ("mesh['a'=1,'b'=4] {'b'}", {(0, 1, 2, 3)}),
        ("mesh['data'=2,'tensor'=4] {'data'}", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        ("mesh['data'=2,'tensor'=4] {'data','tensor'}", {(0, 1, 2, 3, 4, 5, 6, 7)}),
        ("mesh['a'=2,'b'=4] {}", {(i,) for i in range(8)}),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", {(0, 2, 4, 6), (1, 3, 5, 7)}),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'a'}", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", {(0, 2), (1, 3)}),
        ("mesh['a'=8] {'a':(1)2}", {(0, 4), (1, 5), (2, 6), (3, 7)}),
        ("mesh['a'=8] {'a':(2)2}", {(0, 2), (1, 3), (4, 6), (5, 7)}),
        ("mesh['a'=8] {'a':(4)2}", {(0, 1), (2, 3), (4, 5), (6, 7)}),
        ("mesh['a'=8] {'a':(1)2, 'a':(4)2}", {(0, 1, 4, 5), (2, 3, 6, 7)}),
    ],
)
def test_replica_groups_are_read_in_each_form(text, want):
    assert members(parse_groups(text, 8)) == {frozenset(group) for group in want}


@st.composite
def meshes(draw):
    """Axis sizes, and a subset of the axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return dict(zip("abcd", sizes, strict=False)), draw(st.sets(st.sampled_from("abcd"[: len(sizes)])))


def along(sizes, chosen):
    """Groups of devices that differ along the chosen axes alone."""
    order = [i for i, axis in enumerate(sizes) if axis not in chosen] + [
        i for i, axis in enumerate(sizes) if axis in chosen
    ]
    width = math.prod(size for axis, size in sizes.items() if axis in chosen)
    ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    return ids.transpose(order).reshape(-1, width), order


def forms(sizes, chosen, order):
    """The same groups as XLA may print them."""
    groups, shape = along(sizes, chosen)[0], list(sizes.values())
    ids = np.arange(groups.size).reshape(shape).transpose(order)
    names = "{" + _list(f"'{axis}'" for axis in sizes if axis in chosen) + "}"
    turned = "mesh[" + _list(f"'{list(sizes)[i]}'={shape[i]}" for i in order) + "]"
    iota = f"[{_list(shape)}]T({_list(order)})"
    before = dict(zip(sizes, [1, *np.cumprod(shape).tolist()], strict=False))
    parts = [f"'all':({before[axis]}){sizes[axis]}" for axis in sizes if axis in chosen and sizes[axis] > 1]
    yield "{" + _list("{" + _list(row) + "}" for row in groups) + "}"
    yield f"[{_list(groups.shape)}]<={iota}"
    yield "mesh[" + _list(f"'{axis}'={size}" for axis, size in sizes.items()) + "] " + names
    yield f"{turned}, device_ids=({iota}) {names}"
    yield f"{turned}, device_ids=({_list(ids.reshape(-1))}) {names}"
    yield f"mesh['all'={groups.size}] {{{_list(parts)}}}"


def _list(items):
    return ",".join(map(str, items))


@given(meshes())
@settings(deadline=None)
def test_each_form_of_the_groups_of_any_axes_gives_back_these_axes(mesh):
    sizes, chosen = mesh
    groups, order = along(sizes, chosen)
    for text in forms(sizes, chosen, order):
        found = parse_groups(text, groups.size)
        assert members(found) == members(groups), text
        assert axes_of_groups(found, sizes) == tuple(axis for axis in sizes if axis in chosen and sizes[axis] > 1), text


@pytest.mark.nightly
@given(meshes(), st.integers(2, 3), st.integers(2, 3), st.booleans())
@settings(deadline=None)
def test_groups_within_an_axis_are_marked_as_a_part_of_it(mesh, part, rest, inner):
    sizes, _ = mesh
    split = {"outer": part, "inner": rest} | {axis: size for axis, size in sizes.items() if axis != "a"}
    groups, _ = along(split, {"inner" if inner else "outer"})
    whole = {"a": part * rest} | {axis: size for axis, size in sizes.items() if axis != "a"}
    assert axes_of_groups(groups, whole) == ("~a",)


@pytest.mark.parametrize("groups", [[[0, 1, 2], [3, 4, 5]], [[0, 5], [1, 4]], [[0, 3], [1, 2]]])
def test_groups_that_fit_no_axes_are_marked(groups):
    assert all(axis.startswith("~") for axis in axes_of_groups(np.array(groups), SIZES))


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("tensor",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,5},{5,0}}", ("data", "tensor")),
        ("{{0,0},{1,1}}", ()),
        ("{}", ()),
    ],
)
def test_a_permute_moves_along_the_axes_that_change(text, axes):
    pairs = parse_pairs(text, 8)
    assert pairs.shape[1] == 2
    assert axes_of_pairs(pairs, SIZES) == axes


@pytest.mark.parametrize(
    ("pairs", "group", "senders"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", 4, 1.0),
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", 4, 0.75),
        ("{{2,3},{1,2},{0,1}}", 4, 0.375),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, 0.5),
        ("{{0,0},{1,4},{4,1},{7,7}}", 2, 0.25),
        ("{{0,1},{4,5},{5,6},{6,7},{7,4}}", 4, 0.625),
    ],
)
def test_a_permute_sends_what_its_senders_send(pairs, group, senders):
    (entry,) = sent(program(f"%x = f32[8,16]{{1,0}} collective-permute(%p), source_target_pairs={pairs}"))
    assert (entry.group, entry.senders, entry.wire) == (group, senders, 512 * senders)


@pytest.mark.parametrize(
    ("groups", "entries"),
    [
        ("{{0,1,2,3,4,5,6},{7}}", [(7, 7 / 8)]),
        ("{{0},{1,2,3},{4,5,6,7}}", [(4, 4 / 8), (3, 3 / 8)]),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", []),
    ],
)
def test_groups_of_unequal_sizes_send_the_mean_of_what_their_devices_send(groups, entries):
    text = f"%x = f32[8,16]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"
    ledger = sent(program(text))
    assert sorted(((entry.group, entry.senders) for entry in ledger), reverse=True) == entries
    assert {axis.strip("~") for entry in ledger for axis in entry.axes} <= {"data", "tensor"}
    # by a ring, a device of a group of n sends 2 (n - 1) / n of the 512 bytes
    sizes = [len(group.split(",")) for group in groups.split("},{")]
    assert sum(entry.wire for entry in ledger) == pytest.approx(sum(2 * 512 * (n - 1) for n in sizes) / 8)


@given(st.integers(0, 2**40), st.integers(2, 2**12))
def test_wire_bytes_are_those_of_ring_algorithms(payload, group):
    part = payload * (group - 1) / group
    assert wire_bytes("all-gather", payload, group) == part
    assert wire_bytes("reduce-scatter", payload, group) == part
    assert wire_bytes("all-to-all", payload, group) == part
    assert wire_bytes("all-reduce", payload, group) == pytest.approx(2 * part)
    assert wire_bytes("collective-permute", payload, group) == payload


# ---- the ledger


@pytest.mark.parametrize("release", [*RELEASES, "cpu_0.12.0.1"])
def test_each_kind_has_the_bytes_counted_by_hand(release):
    x = 16 * 64 * 4  # [32, 256] float32 over both axes
    y = 32 * 128 * (4 if "cpu" in release else 2)  # [64, 128] bfloat16 over data; the processor sends float32
    found = {(e.kind, e.axis): (e.group, e.payload, e.wire, e.times, e.count) for e in sent(TEXTS[f"kinds_{release}"])}
    assert found == {
        ("all-reduce", "tensor"): (4, x, 2 * x * 3 / 4, 1, 1),
        ("reduce-scatter", "tensor"): (4, x, x * 3 / 4, 1, 1),
        ("all-to-all", "tensor"): (4, x, x * 3 / 4, 1, 1),
        ("collective-permute", "tensor"): (4, x, x, 1, 1),
        ("collective-permute", "data"): (2, y, y / 2, 1, 1),
        ("all-gather", "data"): (2, 2 * y, y, 1, 1),
        ("all-reduce", "data,tensor"): (8, y, 2 * y * 7 / 8, 1, 1),
    }


@pytest.mark.parametrize(
    ("release", "started"),
    [
        ("gpu_0.10.2", {("all-reduce", "data,tensor"), ("collective-permute", "tensor")}),
        ("gpu_0.12.0.1", {("all-reduce", "data,tensor"), ("all-reduce", "tensor"), ("all-gather", "data"),
                          ("collective-permute", "data")}),
        ("cpu_0.12.0.1", set()),
    ],
)  # fmt: skip
def test_asynchronous_is_what_has_work_in_between(release, started):
    assert {(entry.kind, entry.axis) for entry in sent(TEXTS[f"kinds_{release}"]) if entry.asynchronous} == started


@every_release
def test_arrays_sent_together_are_entries_of_their_own(release):
    gathered = sent(TEXTS[f"gathered_{release}"])
    assert [(e.payload, e.count) for e in gathered] == [(64 * (16 + i) * 4, 6) for i in reversed(range(6))]
    scattered = sent(TEXTS[f"scattered_{release}"])
    assert {(e.dtype, e.payload, e.count) for e in scattered} == {
        ("f32", 32 * 16 * 4, 2), ("f32", 32 * 8 * 4, 2), ("bf16", 64 * 8 * 2, 1),
    }  # fmt: skip


@every_release
def test_a_pipeline_of_one_stage_sends_nothing(release):
    assert "source_target_pairs={}" in TEXTS[f"one_stage_{release}"]
    assert sent(TEXTS[f"one_stage_{release}"]) == []


@every_release
def test_a_tensor_parallel_layer_reduces_its_output_and_its_gradients(release):
    found = {(e.axis, e.payload, e.backward): e.times for e in sent(TEXTS[f"layer_{release}"])}
    assert found == {("tensor", 8 * 64 * 4, False): 1, ("data", 64 * 32 * 4, True): 2}


def test_groups_of_one_send_nothing():
    assert sent(program("%x = f32[8,16]{1,0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add")) == []


# ---- FLOP


@every_release
@pytest.mark.parametrize("name", ["products", "cublas"])
def test_products_have_the_flop_counted_by_hand(name, release):
    flop = hardware_flop(parse(TEXTS[f"{name}_{release}"]))  # half of the rows, half of the batch
    assert flop.total == 2 * 256 * 256 * 128 + 2 * 4 * 256 * 128 * 64
    assert flop.by_dtype == {"bf16": flop.total}


@every_release
def test_a_product_of_eight_bits_is_counted(release):
    assert hardware_flop(parse(TEXTS[f"narrow_{release}"])).by_dtype == {"f8e4m3fn": 2 * 256 * 256 * 128}


@pytest.mark.parametrize("release", [*RELEASES, "cpu_0.12.0.1"])
def test_a_convolution_and_its_two_gradients_have_the_same_flop(release):
    one = 2 * (8 * 8 * 8 * 32) * (3 * 3 * 8)  # outputs x the kernel's entries of each; 8 images, stride 2
    flop = hardware_flop(parse(TEXTS[f"convolution_{release}"]))
    assert flop.total == 3 * one
    assert "cpu" in release or (flop.forward, flop.backward) == (one, 2 * one)


@every_release
def test_a_layer_has_the_flop_of_its_passes(release):
    one = 2 * 8 * 64 * 32  # 8 examples, a quarter of 128 hidden
    flop = hardware_flop(parse(TEXTS[f"layer_{release}"]))  # two products forward; two weights', one input's backward
    assert (flop.forward, flop.backward, flop.recomputed, flop.unknown) == (2 * one, 3 * one, 0, False)


DOT = """\
%body (x: f32[16,16]) -> f32[16,16] {
  %x = f32[16,16]{1,0} parameter(0)
  ROOT %xx = f32[16,16]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%on (y: f32[16,16]) -> pred[] {
  %y = f32[16,16]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""


@pytest.mark.parametrize(
    ("config", "turns", "unknown"), [(', backend_config={"known_trip_count":{"n":"7"}}', 7, False), ("", 1, True)]
)
def test_flop_in_a_loop_count_as_often_as_it_turns(config, turns, unknown):
    loop = f"%w = f32[16,16]{{1,0}} while(%q), condition=%on, body=%body{config}"
    flop = hardware_flop(parse(program("%q = f32[16,16]{1,0} custom-call(%p)", loop, above=ADD + DOT)))
    assert (flop.total, flop.unknown) == (turns * 2 * 16**3, unknown)


def test_a_transposed_convolution_multiplies_no_zeros():
    def up(x, kernel):
        return lax.conv_transpose(x, kernel, (2, 2), "SAME")

    x, kernel = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32), jax.ShapeDtypeStruct((2, 2, 3, 5), jnp.float32)
    assert forward_flop(up, x, kernel) == 2 * (8 * 8 * 3) * (2 * 2 * 5)


def test_entries_of_a_ragged_matmul_meet_the_matrix_of_their_group_alone():
    def loss(x, matrices, sizes):
        return (lax.ragged_dot(x, matrices, sizes) ** 2).sum()

    shapes = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    assert forward_flop(loss, *shapes, sizes) == 2 * 32 * 8 * 16
    assert forward_flop(jax.grad(loss, argnums=(0, 1)), *shapes, sizes) == 3 * 2 * 32 * 8 * 16


# ---- garbage


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_ends_early_is_refused(name):
    lines = TEXTS[name].rstrip().splitlines()
    for count in range(0, len(lines), 10):
        with pytest.raises(JaxparError, match="begins with HloModule" if not count else "ENTRY computation|one ROOT"):
            parse("\n".join(lines[:count]))


@pytest.mark.parametrize("name", ["kinds_gpu_0.12.0.1", "layer_gpu_0.10.2", "convolution_cpu_0.12.0.1"])
def test_a_text_with_any_line_missing_is_refused(name):
    lines = TEXTS[name].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("%"))
    for number in [0, *(number for number in range(begin, len(lines)) if lines[number])]:
        with pytest.raises(JaxparError, match="rule:"):
            parse("\n".join(lines[:number] + lines[number + 1 :]))


@given(st.sampled_from([name for name in TEXTS if "0.12" in name]), st.data())
@settings(deadline=None)
def test_a_damaged_text_is_read_or_refused(name, data):
    text = TEXTS[name]
    begin = data.draw(st.integers(0, len(text)))
    end = begin + data.draw(st.integers(0, 30))
    with suppress(JaxparError):
        module = parse(text[:begin] + data.draw(st.text('{}[](),=%" 019afx.\n', max_size=8)) + text[end:])
        collectives(module, SIZES, ArrayCauses(()))
        hardware_flop(module)


@pytest.mark.parametrize("text", ["", "\n", "module @jit_f {}", "hello", '{"hlo": 1}', "ENTRY %main () -> f32[] {\n}"])
def test_what_is_no_hlo_is_refused(text):
    with pytest.raises(JaxparError) as error:
        parse(text)
    refused(
        error, repr(text.splitlines()[0] if text.strip() else text)[1:-1][:20], "begins with HloModule", "as_text()"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%x = f12[8]{0} negate(%p)", ["dtype f12 in 'f12[8]{0}'", "bf16", "a newer jaxpar"]),
        ("%x = f32[8 negate(%p)", ["line 11", "name = type opcode(operands), attributes", "whole"]),
        ("%x = f32[8]{0} negate(%p", ["line 11", "name = type opcode(operands), attributes"]),
        ("negate(%p)", ["line 11: 'ROOT negate(%p)'", "name = type opcode(operands), attributes"]),
        ("%x = f32[8]{0} parameter(first)", ["line 11", "parameter(first)"]),
        (
            "%x = f32[8]{0} negate(%q)",
            ["x reads q, which main does not have", "every operand is an instruction", "save it again"],
        ),
        (
            "%x = f32[8]{0} call(%p), to_apply=%gone",
            ["x calls gone, which is not in the text", "that is called is in the text"],
        ),
        ("%x = f32[] while(%p), condition=%gone, body=%add", ["x calls gone, which is not in the text"]),
    ],
)
def test_an_instruction_that_is_none_is_refused(line, words):
    with pytest.raises(JaxparError) as error:
        parse(program(line))
    refused(error, *words)


@pytest.mark.parametrize(
    "text",
    [
        "garbage",
        "{0,1}",
        "{{0,1},{0}}",
        "{{0,1},{1,2}}",
        "{{0,0}}",
        "{{0,1},x,{2,3}}",
        "{{0,1},{2,3}",
        "{{-1,0}}",
        "{{0,8}}",
        "[2,4]<=[4]",
        "[8]<=[8]",
        "[2,5]<=[10]",
        "[1,99999999999]<=[99999999999]",
        "[2,4]<=[4,2]T(1,1)",
        "[2,4]<=[4,2]T(5,0)",
        "[2,4]<=[8]junk",
        "mesh['a'=2,'b'=4] {'c'}",
        "mesh['a'=2,'b'=8] {'b'}",
        "mesh['a'=9] {'a':(2)2}",
        "mesh['a'=8] {'a':(0)2}",
        "mesh['a'=2,'b'=4], device_ids=([2,2]) {'b'}",
        "mesh['a'=2,'b'=2], device_ids=(0,1,2) {'b'}",
        "mesh['a'=2,'b'=2], device_ids=(0,1,2,9) {'b'}",
        "mesh['a'=2,'b'=4] {tensor}",
        "mesh[a] {'b'}",
    ],
)
def test_replica_groups_that_are_none_are_refused(text):
    with pytest.raises(JaxparError) as error:
        parse_groups(text, 8)
    refused(error, f"replica_groups={text}", "groups are {{0,1},{2,3}}", "devices of the program", "newer jaxpar")


@pytest.mark.parametrize("text", ["garbage", "{0,1}", "{{0,1},{2}}", "{{0,1},{x,2}}", "{{0,8}}", "{{0,1}", "{{0,-1}}"])
def test_pairs_that_are_none_are_refused(text):
    with pytest.raises(JaxparError) as error:
        parse_pairs(text, 8)
    refused(error, f"source_target_pairs={text}", "pairs are {{0,1},{1,2}}", "that XLA printed")


def test_a_collective_of_devices_that_the_program_lacks_is_refused():
    with pytest.raises(JaxparError) as error:
        sent(program("%x = f32[8,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", partitions=4))
    refused(error, "replica_groups=[2,4]<=[8]", "devices of the program")


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"device": 1}])
@pytest.mark.parametrize(
    "op",
    ["all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", "collective-permute(%p), source_target_pairs={{0,7}}"],
)
def test_a_collective_beyond_the_mesh_is_refused(op, sizes):
    with pytest.raises(JaxparError) as error:
        sent(program(f"%x = f32[8,16]{{1,0}} {op}"), sizes)
    refused(error, "device 7 on a mesh", " x ".join(f"{axis}={size}" for axis, size in sizes.items()), "mesh=that mesh")


@pytest.mark.parametrize("dims", ["{7}", "{one}"])
def test_a_product_over_dims_that_are_not_there_is_refused(dims):
    with pytest.raises(JaxparError) as error:
        hardware_flop(parse(program(f"%x = f32[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={dims}")))
    refused(error, "x = dot(p, p)", "dims that its operands have", "whole")


# ---- targets and programs that are none


KNOWN = "one of: a100 (80 GB), h100 (80 GB), h200 (141 GB)"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("h900:1x8", ["'h900:1x8'", "CHIP:NODESxGPUS", "chips are h200, h100, a100", KNOWN]),
        ("", ["target ''", "CHIP:NODESxGPUS", KNOWN]),
        ("cpu:1x8", ["'cpu:1x8'", "or cpu", "cpu, without counts"]),
        (8, ["'8'", "CHIP:NODESxGPUS"]),
        *(
            (target, [f"{target!r}", "CHIP:NODESxGPUS", "1 to 65,536 GPUs", "h100:16x8 for 16 nodes of 8 GPUs"])
            for target in ("h100", "h100:", "h100:0x8", "h100:8", "h100:axb", "h100:8x", "h100:-1x8", "h100:1x8x2",
                           "h100:1.5x8", "h100:99999x8", "h100:999999999x8")
        ),
    ],
)  # fmt: skip
def test_a_target_that_does_not_exist_is_refused(target, words):
    with pytest.raises(JaxparError) as error:
        jp.target_devices(target)
    refused(error, *words)


def test_a_target_is_read_as_it_is_meant():
    assert str(parse_target(" H100:16X8 ")) == "h100:16x8"
    assert parse_target("a100", devices=64).devices == 64
    assert str(parse_target("h200", devices=4)) == "h200:1x4"


def spread(*devices, axis="data"):
    return NamedSharding(Mesh(np.array(devices), (axis,)), P(axis))


def test_what_is_not_jitted_is_not_inspected():
    with pytest.raises(JaxparError) as error:
        jp.inspect(lambda x: x, jnp.ones(8))
    refused(error, "<lambda>", "a jitted function, or a step of jp.train_step", "jax.jit(f)")


@pytest.mark.parametrize("other", ["axis", "order"])
def test_arguments_on_two_meshes_are_refused(other):
    devices = jax.devices()
    there = spread(*devices, axis="tensor") if other == "axis" else spread(*reversed(devices))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=spread(*devices))
    y = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=there)
    with pytest.raises(JaxparError) as error:
        jp.inspect(jax.jit(jnp.add), x, y)
    refused(error, "arguments on meshes {'data': 8}", "one mesh", "shard every argument over the same mesh")


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (("weights",), ["roles=('weights',)", "parameters, optimizer state, other state, batch, arguments"]),
        (("batch", "batch"), ["2 roles for 1 arguments", "one role for each argument", "fewer roles"]),
    ],
)
def test_roles_that_do_not_exist_are_refused(roles, words):
    with pytest.raises(JaxparError) as error:
        jp.inspect(jax.jit(jnp.sin), jax.ShapeDtypeStruct((8,), jnp.float32), roles=roles)
    refused(error, *words)


# ---- the compiler that is installed prints what is read here


def on_h100s(*shapes_and_specs):
    mesh = Mesh(np.array(jp.target_devices("h100:1x8")).reshape(2, 4), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    return mesh, [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in shapes_and_specs
    ]


@compiler
def test_the_installed_compiler_prints_kinds_that_are_read():
    mesh, (x,) = on_h100s(((32, 256), jnp.float32, P("data", "tensor")))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"), check_vma=False)
    def program(x):
        def turn(_, x):
            x = lax.all_to_all(lax.psum(x, "tensor"), "tensor", 0, 0, tiled=True)
            return lax.all_gather(lax.psum_scatter(x, "data", tiled=True), "data", tiled=True)

        return lax.ppermute(lax.fori_loop(0, 3, turn, x), "tensor", [(0, 1), (1, 2), (2, 3)])

    found = {(e.kind, e.axis): (e.times, e.payload, e.dtype, e.senders) for e in jp.inspect(program, x).ledger}
    assert found == {
        ("all-reduce", "tensor"): (3, 4096, "f32", 1.0),
        ("all-to-all", "tensor"): (3, 4096, "f32", 1.0),
        ("reduce-scatter", "data"): (3, 4096, "f32", 1.0),
        ("all-gather", "data"): (3, 4096, "f32", 1.0),
        ("collective-permute", "tensor"): (1, 4096, "f32", 0.75),
    }


@compiler
def test_the_installed_compiler_prints_products_that_are_counted():
    _, (x, up, down) = on_h100s(
        ((16, 64), jnp.float32, P("data")),
        ((64, 128), jnp.float32, P(None, "tensor")),
        ((128, 64), jnp.float32, P("tensor")),
    )
    report = jp.inspect(jax.jit(lambda x, up, down: jnp.tanh(x @ up) @ down), x, up, down)
    assert report.flop.total == 2 * 2 * 8 * 64 * 32
    assert [(e.kind, e.axis, e.payload, e.times) for e in report.ledger] == [("all-reduce", "tensor", 8 * 64 * 4, 1)]
    assert report.ledger[0].source.startswith("test_hlo.py:")
