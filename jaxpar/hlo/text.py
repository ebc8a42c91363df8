"""Parses the text of a compiled program into computations of instructions.

    %all-gather-start.1 = (f32[2]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[1,8]<=[8], metadata={...}
     name                 result                  opcode           operands  attributes

Result arrays and operands are parsed immediately, attributes on demand. The text is that of XLA's
`HloModule::ToString`, because no release of jaxlib has the classes of its protocol buffers.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxpar.errors import JaxparError, refuse

# bits of an element. An unknown dtype is refused: a guess would make every sum wrong
BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f4e2m1fn": 4, "f6e2m3fn": 8, "f6e3m2fn": 8, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8,
    "f8e4m3fn": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32,
    "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
MOST = 2**20  # devices: a larger number means a damaged text, and is refused before it becomes the size of an array
# numbers below are read as \d{1,18}, so that a damaged text cannot make an integer of millions of digits
_ARRAY = re.compile(r"\b(\w+)\[([\d,<=]*)\]|\b(token|opaque)\b")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+)\s*(\(.*\)\s*->.*)?\{\s*$")
_LEFT = re.compile(r"^(ROOT )?%?([\w.\-]+) = ")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OPERAND = re.compile(r"%([\w.\-]+)")
# without `condition=`, which runs once more often than the body: see `Op.condition`
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class HloArray:
    """Shape and dtype of one array, as HLO writes them."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    @property
    def bytes(self) -> int:
        """Bytes, without padding."""
        return -(-self.size * BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Op:
    """One instruction.

    Attributes:
      name: Its name, unique in the module.
      arrays: The arrays of its result; tuples are flattened.
      opcode: The operation, such as `dot`, `while` or `all-gather-start`.
      operands: Names of instructions of the same computation.
      operand_text: The text between the operands' parentheses; for a parameter its number, for a constant its value.
      attributes: The text after the parentheses.
      root: Whether its computation returns it.
    """

    name: str
    arrays: tuple[HloArray, ...]
    opcode: str
    operands: tuple[str, ...]
    operand_text: str = field(repr=False)
    attributes: str = field(repr=False)
    root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def label(self) -> str:
        """The path of JAX scopes and the operation that it comes from: `jit(step)/jvp(Decoder)/dot_general`."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\([\"'\\])", r"\1", match[1]) if match else ""

    @cached_property
    def unquoted_attributes(self) -> str:
        """The attributes without quoted text, because a user may name a scope `body=x`."""
        return _QUOTED.sub('""', self.attributes)

    @cached_property
    def callees(self) -> tuple[str, ...]:
        """Computations that it calls, except the condition of a loop."""
        names = _CALLED.findall(self.unquoted_attributes)
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.unquoted_attributes):
            names += [name.strip().lstrip("%") for name in branches[1].split(",")]
        return tuple(names)

    @property
    def condition(self) -> tuple[str, ...]:
        """The computation of a loop's condition."""
        name = self.attribute("condition") if self.opcode == "while" else None
        return (name.lstrip("%"),) if name else ()

    def attribute(self, name: str) -> str | None:
        """Returns the text of `name=text` or `name={text}`."""
        match = re.search(rf"\b{name}=(?:\{{([^{{}}]*)\}}|([^,\s]+))", self.unquoted_attributes)
        return None if match is None else match[1] if match[1] is not None else match[2]

    @cached_property
    def config(self) -> dict[str, Any]:
        """`backend_config`, if it is JSON: XLA's cost model, trip counts, whether a collective is synchronous."""
        start = self.attributes.find("backend_config=")
        if start < 0:
            return {}
        try:
            # decoded in place: the JSON is followed by further attributes, and its end is known only by decoding it
            value, _ = json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class SourceFrame:
    """A line of Python and its function, from the metadata that JAX gives to XLA.

    Attributes:
      file: The file.
      line: The number of the line.
      function: Name of the function.
      column: The column at which the expression begins, counted from 1; None if unknown.
    """

    file: str
    line: int
    function: str
    column: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      name: Name of the compiled function.
      partitions: Number of devices that it runs on.
      entry: Name of the computation that runs first.
      computations: Name to instructions; in a scheduled module, in the order in which they start.
      scheduled: Whether that order is the order of execution.
      frames: Number of a stack frame to (its frame, number of its caller).
    """

    name: str
    partitions: int
    entry: str
    computations: dict[str, list[Op]] = field(repr=False)
    scheduled: bool
    frames: dict[int, tuple["SourceFrame", int]] = field(repr=False)

    def ops(self) -> Iterator[tuple[str, Op]]:
        """Yields (computation, instruction)."""
        for name, ops in self.computations.items():
            for op in ops:
                yield name, op

    @cached_property
    def ops_by_name(self) -> dict[str, dict[str, Op]]:
        """Computation to name to instruction."""
        return {name: {op.name: op for op in ops} for name, ops in self.computations.items()}

    def stack(self, op: Op) -> list["SourceFrame"]:
        """Returns the stack of Python lines that traced an instruction, innermost first."""
        if match := re.search(r"stack_frame_id=(\d{1,18})", op.attributes):
            number, frames = int(match[1]), []
            while number in self.frames and len(frames) < 200:  # a damaged text may hold a cycle
                frame, number = self.frames[number]
                frames.append(frame)
            return frames
        # before stack frames XLA printed one line of the source with each instruction
        match = re.search(r'source_file="([^"]*)"(?:[^}]*?source_line=(\d{1,18}))?', op.attributes)
        return [SourceFrame(match[1], int(match[2] or 0), "")] if match else []


def parse(text: str) -> Module:
    """Parses a text into a module.

    Raises:
      JaxparError: If the text is not HLO, or is truncated.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise refuse(
            f"a text that begins with {text[:40]!r}",
            rule="the text of a compiled module begins with HloModule",
            fix="jitted.lower(...).compile().as_text()",
        )
    head = lines[0]
    computations: dict[str, list[Op]] = {}
    entry, current, ops = "", None, []
    for number, line in enumerate(lines[1:], 2):
        stripped = line.strip()
        # between computations: a head opens the next one; other lines are tables of file names, or empty
        if current is None:
            if (match := _HEAD.match(line)) and (match[1] or match[3] or line.startswith("%")):
                current, ops = match[2], []
                entry = current if match[1] else entry
            elif _LEFT.match(stripped):
                raise refuse(
                    f"line {number}: {stripped[:100]!r}",
                    rule="every instruction stands inside a computation",
                    fix="the text as XLA printed it, whole",
                )
        elif stripped == "}" or stripped.startswith("}, "):  # the latter before `execution_thread="..."`
            computations[current], current = ops, None
        elif stripped:
            ops.append(instruction(stripped, number))
    if current is not None or not entry:
        place = f"in {current}" if current else "before an ENTRY computation"
        raise refuse(
            f"an HLO text of {len(lines)} lines that ends {place}",
            rule="a module ends with its ENTRY computation, which is whole",
            fix="save it again",
        )
    # JAX compiles with partitions alone, other frontends with replicas: together they are the devices
    partitions = _header(head, "num_partitions") * _header(head, "replica_count")
    if not 1 <= partitions <= MOST:
        raise refuse(
            f"a module for {partitions} devices", rule=f"1 to {MOST:,} devices", fix="the text as XLA printed it, whole"
        )
    module = Module(
        name=re.sub(r"^HloModule\s*|[\s,].*", "", head),
        partitions=partitions,
        entry=entry,
        computations=computations,
        scheduled="is_scheduled=true" in head,
        frames=_frames(text),
    )
    _check_complete(module)
    return module


def _check_complete(module: Module) -> None:
    for name, ops in module.computations.items():
        if sum(op.root for op in ops) != 1:
            raise refuse(
                f"{name} with {sum(op.root for op in ops)} ROOTs",
                rule="every computation has one ROOT",
                fix="save it again",
            )
    for computation, op in module.ops():
        for name in (*op.callees, *op.condition):
            if name not in module.computations:
                raise refuse(
                    f"{op.name} calls {name}, which is not in the text",
                    rule="every computation that is called is in the text",
                    fix="save it again",
                )
        for name in op.operands:  # a constant's text may look like names
            if name not in module.ops_by_name[computation] and op.opcode != "constant":
                raise refuse(
                    f"{op.name} reads {name}, which {computation} does not have",
                    rule="every operand is an instruction of the same computation",
                    fix="save it again",
                )


def _header(head: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d{{1,18}})", head)
    return int(match[1]) if match else 1


def instruction(line: str, number: int) -> Op:
    """Parses the instruction on a stripped line; `number` is the line number, for messages."""
    head = _LEFT.match(line)
    try:
        if not head:
            raise ValueError
        # by brackets, not by one regular expression: results and operands nest tuples and layouts to any depth
        result_end = _find_closing(line, head.end()) if line[head.end()] == "(" else line.index(" ", head.end())
        opcode_end = line.index("(", result_end)
        operands_end = _find_closing(line, opcode_end)
        result, opcode = line[head.end() : result_end], line[result_end:opcode_end].strip()
        operand_text = line[opcode_end + 1 : operands_end - 1]
        result_arrays = arrays(result)
        if (not result_arrays and result.strip("() ,")) or (opcode == "parameter" and not operand_text.isdecimal()):
            raise ValueError
        return Op(
            name=head[2],
            arrays=result_arrays,
            opcode=opcode,
            # the parentheses of these two hold a value and a number, which may look like names
            operands=() if opcode in ("constant", "parameter") else tuple(_operands(operand_text)),
            operand_text=operand_text,
            attributes=line[operands_end:],
            root=bool(head[1]),
        )
    except JaxparError:
        raise
    except (ValueError, IndexError) as error:
        raise refuse(
            f"line {number}: {line[:100]!r}",
            rule="an instruction is `name = type opcode(operands), attributes`",
            fix="the text as XLA printed it, whole",
        ) from error


def _operands(inside: str) -> list[str]:
    names = _OPERAND.findall(inside)
    if names or not inside:
        return names
    # some versions print operands without `%`, after their types; commas inside of brackets separate dims, not operands
    return [part.split()[-1] for part in re.split(r",(?![^\[{(]*[\]})])", inside) if part.strip()]


def _find_closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth, quoted, index = 0, False, start
    while index < len(text):
        char = text[index]
        if quoted:
            index += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
            if depth == 0:
                return index + 1
        index += 1
    raise ValueError("unbalanced")


def arrays(text: str) -> tuple[HloArray, ...]:
    """Parses the arrays of a type: `(f32[2]{0}, s32[])` has two.

    Raises:
      JaxparError: If a dtype is unknown.
    """
    # layouts in braces, `{1,0:T(8,128)}`, have no brackets and are passed over
    result = []
    for dtype, dims, token in _ARRAY.findall(text):
        if (dtype or token) not in BITS:
            raise refuse(f"dtype {dtype} in {text[:60]!r}", rule=f"one of {', '.join(BITS)}", fix="a newer jaxpar")
        sizes = [int(dim.lstrip("<=")) for dim in dims.split(",") if dim]  # a bounded dim counts as its bound
        result.append(HloArray(dtype or token, tuple(sizes)))
    return tuple(result)


def _frames(text: str) -> dict[int, tuple[SourceFrame, int]]:
    """Parses the tables of files and stack frames that newer versions of XLA print before the computations."""
    tables: dict[str, dict[int, str]] = {}
    current = None
    for line in text.splitlines()[1:]:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif line.startswith(("%", "ENTRY")):  # the tables stand before the first computation
            break
        elif current is not None and (match := re.match(r"(\d{1,18}) (.*)", line)):
            current[int(match[1])] = match[2]
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    places = {
        number: SourceFrame(
            files.get(_number(entry, "file_name_id"), "").strip('"'),
            _number(entry, "line"),
            functions.get(_number(entry, "function_name_id"), "").strip('"'),
        )
        for number, entry in tables.get("FileLocations", {}).items()
    }
    nowhere = SourceFrame("", 0, "")
    return {
        # XLA prints the caller's number plus one: the first frame of a stack names itself
        number: (places.get(_number(entry, "file_location_id"), nowhere), _number(entry, "parent_frame_id") - 1)
        for number, entry in tables.get("StackFrames", {}).items()
    }


def _number(text: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d{{1,18}})", text)
    return int(match[1]) if match else 0
