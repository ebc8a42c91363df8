"""Finds specs for a model and its loss: traces them, solves the integer program, and names the solution."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import JaxparError, refuse
from jaxpar.hlo.flop_share import ALLOWED
from jaxpar.mesh.chips import suggest_chip
from jaxpar.optim.patterns import as_patterns
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.rule_problems import rule_problems
from jaxpar.plan.machine.hardware import HARDWARE, Hardware
from jaxpar.sharding.names import Blueprint
from jaxpar.specs.collectives import StepCosts
from jaxpar.specs.names import NamedSpecs, name_solution
from jaxpar.specs.optimize import TIE, Solution, SpecsSolver
from jaxpar.specs.program import TracedProgram
from jaxpar.specs.trace import TracedLoss
from jaxpar.specs.user_input import check_arguments, merge_names, replaced_annotations, show_names
from jaxpar.units import show_bytes

AXIS = "tensor"
AXES = ("context", AXIS)  # for which specs are found, outermost first; every other axis has a fixed meaning
UPDATE = 28  # bytes of memory traffic per parameter of AdamW's update: parameter, gradient and two moments
STATE = 16  # bytes of a float32 parameter, its gradient and two moments


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FoundSpecs:
    """The dims of a model's parameters and activations that an axis, or each of two, should split.

    Attributes:
      parallel: The declaration with the names and rules that were found; a step treats them like the user's own.
      axes: The axes for which dims were found, outermost first.
      specs: Names of the dims of parameters and of activations, and the rules for them.
      solution: The modelled seconds of a step, their lower bound, and the bytes of a device.
      reasons: Each name to the reason for its split: the seconds of a step that does not split its dims.
      unknown: Names of primitives that the analysis does not know: dims of their arrays stay unsplit.
      note: Says that the cheapest choice would leave an axis idle or split no parameter, if that is so; else "".
      differing: The user's own names that differ from those found; the user's are used.
      replaced: Names that the model gives its parameters, which those found replace as they split other dims.
      seconds: Seconds that tracing, analysis and solving took.
      chip: The GPU for which they are found.
    """

    parallel: Parallel
    axes: tuple[str, ...]
    specs: NamedSpecs
    solution: Solution
    reasons: Mapping[str, str]
    unknown: tuple[str, ...]
    note: str
    differing: tuple[str, ...]
    replaced: tuple[str, ...]
    seconds: float
    chip: str

    def __repr__(self) -> str:
        solution = self.solution
        return (
            f"<specs over {self._sizes}: {', '.join(sorted({*self.specs.names.values()})) or 'none'}; "
            f"{solution.cost * 1e3:.3g} ms modelled, at most {solution.gap:.2%} above the best>"
        )

    @property
    def _sizes(self) -> str:
        return _format_axes(self.parallel, self.axes)

    @property
    def sentence(self) -> str:
        """The names, their cost and its lower bound, in one sentence."""
        return (
            f'specs="found": {self._splits}; {self.solution.cost * 1e3:.3g} ms of a step\'s work and traffic, '
            f"modelled, {self.solution.cost / self.solution.bound - 1:.1%} above the least possible"
            f"{f'; {self._repeated}' if self._repeated else ''}{self._differing}"
        )

    @property
    def _repeated(self) -> str:
        """How much of the matmuls' work devices repeat, and why; "" for none."""
        times = self.solution.work * math.prod(self.parallel.sizes[axis] for axis in self.axes)
        if times <= ALLOWED:
            return ""
        return (
            f"each device computes {times:.2f} times its share of the matmuls' FLOP: some are not split, as no dim can "
            f"be split, or as that costs more than it saves on {self.chip}"
        )

    @property
    def _splits(self) -> str:
        names = [
            sorted({name for state, name in self.specs.names.items() if number in self.solution.axes.get(state, ())})
            for number in range(len(self.axes))
        ]
        pairs = zip(self.axes, names, strict=True)
        return "; ".join(f"{axis} splits {', '.join(given) or 'nothing'}" for axis, given in pairs)

    @property
    def _differing(self) -> str:
        parts = (
            ("yours win, unlike the prediction", self.differing),
            ("in place of the model's own names", self.replaced),
        )
        return "".join(f"; {words}: {'; '.join(names)}" for words, names in parts if names)

    def explain(self) -> str:
        """Formats the names with the reason for each, and the predicted cost with its lower bound."""
        solution, lines = self.solution, []
        lines.append(
            f"{self._sizes}: {solution.cost * 1e3:.4g} ms of a step's work and traffic, modelled; no "
            f"other choice costs less than {solution.bound * 1e3:.4g} ms (gap {solution.gap:.2%}); "
            f"{show_bytes(int(solution.memory))} of state and kept activations; {self.seconds:.1f} s"
        )
        if self.parallel.stage:
            lines.append("  each parameter costs its update as without ZeRO, so that every stage has the same names")
        if self.note:
            lines.append(f"  {self.note}")
        if self._repeated:
            lines.append(f"  {self._repeated}")
        lines += [f"  your names are used, which the prediction does not assume: {own}" for own in self.differing]
        lines += [f"  the names that were found replace those of the model: {names}" for names in self.replaced]
        if solution.cost > 1.0001 * solution.best:
            lines.append(f"  the simplest within {TIE:.0%} of the best, {solution.best * 1e3:.4g} ms")
        for number, axis in enumerate(self.axes):
            traffic = sorted(solution.traffic_over(number).items())
            sent = ", ".join(f"{kind} {show_bytes(int(size))}" for kind, size in traffic)
            lines.append(f"  sent by a device over {axis} in a step, predicted: {sent or 'nothing'}")
        lines += [f"  {name:10} {reason}" for name, reason in self.reasons.items()]
        lines += ["parameters"] + [f"  {path:40} {show_names(names)}" for path, names in self.specs.paths.items()]
        lines += ["activations"] + [
            f"  {line:40} {show_names(names)}" for line, names in self.specs.activations.items()
        ]
        if self.specs.rules:
            lines += ["rules"] + [f"  {name:40} {_format_rule(axes)}" for name, axes in self.specs.rules.items()]
        if self.specs.without_line:
            lines += ["left to XLA, because several arrays of one expression have the same shape"]
            lines += [f"  {line}" for line in self.specs.without_line]
        if self.unknown:
            lines += [f"operations without a rule, whose arrays are not split: {', '.join(self.unknown)}"]
        return "\n".join(lines)


def _format_rule(axes: str | tuple[str, ...]) -> str:
    return axes if isinstance(axes, str) else ", ".join(axes)


def axes_of(parallel: Parallel) -> tuple[str, ...]:
    """Returns the axes for which specs are found, outermost first."""
    return tuple(axis for axis in parallel.sizes if axis in AXES and parallel.sizes[axis] != 1)


def _format_axes(parallel: Parallel, axes: Iterable[str]) -> str:
    return " x ".join(f"{axis}={parallel.sizes[axis]}" for axis in axes)


def find_specs(
    model: Callable | Blueprint,
    loss: Callable,
    batch: Mapping[str, Any],
    parallel: Parallel,
    *,
    precision: str = "fp32",
    chip: str = "h100",
    memory: float | None = None,
    examples: bool = False,
    frozen: Collection[str] = (),
) -> FoundSpecs:
    """Finds the dims of parameters and activations that `tensor`, `context`, or both should split.

    The loss and its gradients are traced on shapes, and the dims are chosen by an integer program that is solved
    exactly: FLOP, bytes over the link, launches and device memory on the given chip. The result is names: of parameters
    by their paths, of activations by lines of the source.

    Args:
      model: As for `jp.compose`.
      loss: A function of (model, batch), or of (model, batch, key).
      batch: The global batch: name to an array, or to its shape and dtype; dim 0 is examples.
      parallel: The declaration, with `tensor` or `context` of at least 2; `data` and `fsdp` split the examples. For two
        axes the dims are chosen together: an array may be cut along two dims, or along one by both. If the model calls
        `jp.attention`, `context` splits the dims of tokens that the model names, and dims are found for `tensor` alone.
      precision: Dtype of matmuls: "fp32" or "bf16".
      chip: The GPU, a key of `jaxpar.plan.machine.hardware.HARDWARE`.
      examples: Whether these axes may split examples too where that is cheaper, as data parallelism does for
        convolutions before dense layers ("one weird trick", Krizhevsky 2014, arXiv:1404.5997).
      frozen: Patterns of paths of parameters that the optimizer freezes, as "*/kernel": they have no gradient.
      memory: Bytes of a device that parameters, their state and kept activations may take; None for no limit.

    Raises:
      JaxparError: If the declaration has other axes; if it has `context` for a model that calls `jp.attention`, and no
        `tensor` or no named dim of tokens; if the replicas do not divide the examples; if a path rule or a pattern of
        `frozen` matches no parameter, or a rule or a name is unknown; or if nothing fits in `memory`: the message then
        has the least bytes that any choice needs.
    """
    start = time.perf_counter()
    check_arguments(batch, parallel, precision, memory, examples)
    frozen = as_patterns("frozen", frozen)
    blueprint, rows, search_parallel = as_blueprint(model), _rows(parallel, batch), parallel
    if problems := rule_problems(parallel, blueprint):
        raise JaxparError(*problems)
    traced = TracedLoss(blueprint, loss, batch, rows=rows, precision=precision)
    program = traced.program(frozen)
    if parallel.context > 1 and "attention" in traced.islands:
        # its devices have parts of rows as replicas have rows, along dims that the model names
        rows, search_parallel = (
            rows / parallel.context,
            replace(parallel, data=parallel.data * parallel.context, context=1),
        )
        traced = TracedLoss(blueprint, loss, batch, rows=rows, precision=precision, sequences=True)
        program = traced.program(frozen)
        _check_named(program, blueprint.name, parallel)
    axes = axes_of(search_parallel)
    costs, note = step_costs(_hardware(chip), search_parallel, precision), ""
    sizes = tuple(search_parallel.sizes[axis] for axis in axes)
    examples = examples and rows % math.prod(sizes) == 0
    # with fsdp, two axes must not cut one dim together: XLA (jaxlib 0.12) then computes wrong results. Example: both
    # operands of einsum("bsh,bsd->hd") are P(None, a, None), so it sums over axis a, and its result is P(a, (c, b))
    solver, solution, best = choose_dims(
        program, sizes, costs, parameters=AXIS in axes, memory=memory, examples=examples,
        both=search_parallel.sizes["fsdp"] == 1,
    )  # fmt: skip
    if best is not None:
        note = _note_on_cheapest(*best, search_parallel, chip, rows)
    named = name_solution(solver, solution, axes, tuple(axis for axis in parallel.sizes if axis in parallel.batch_axes))
    lines = traced.lines(named.activations)  # some lines compute other arrays when JAX traces them without gradients
    named = replace(named, activations={line: names for line, names in named.activations.items() if line in lines})
    found, differing = merge_names(parallel, named, program.params)
    return FoundSpecs(
        parallel=found,
        axes=axes,
        specs=named,
        solution=solution,
        reasons=_reasons(solver, solution, named, memory, split=bool(note)),
        note=note,
        differing=differing,
        replaced=replaced_annotations(blueprint, parallel, found, axes),
        unknown=tuple(sorted(program.unknown)),
        seconds=time.perf_counter() - start,
        chip=chip,
    )


def choose_dims(
    program: TracedProgram,
    sizes: tuple[int, ...],
    costs: StepCosts,
    *,
    parameters: bool = True,
    memory: float | None = None,
    examples: bool = False,
    both: bool = True,
) -> tuple[SpecsSolver, Solution, tuple[SpecsSolver, Solution] | None]:
    """Chooses the dims that each axis cuts, so that every axis cuts some matmuls.

    If the cheapest choice leaves an axis idle (or, with `parameters`, splits none), a second program is solved: without
    launches, and with a limit on unsplit matmuls and parameters. Returns the program and its solution; and the cheapest
    choice in the same form, or None if it is the one returned.

    Args:
      program: The program.
      sizes: Sizes of the axes.
      costs: Seconds of work and traffic.
      parameters: Whether some parameter has to be split.
      memory: Bytes that parameters, state and saved activations may take on a device, or None for no limit.
      examples: Whether the axes may split examples too.
      both: Whether two axes may cut one dim together.

    Raises:
      JaxparError: If the axes divide too few dims of matmuls, or nothing fits in `memory`.
    """
    solver = SpecsSolver(program, sizes, costs, examples=examples, both=both)
    solution = solver.solve(memory=memory)
    if not solution.idle and (solver.splits_parameters(solution) or not parameters):
        return solver, solution, None
    split = SpecsSolver(program, sizes, replace(costs, launch=0.0), examples=examples, both=both)
    return split, split.solve(memory=memory, split=True), (solver, solution)


def _check_named(program: TracedProgram, name: str, parallel: Parallel) -> None:
    """Checks a model that calls `jp.attention`: it must name the dim that `context` splits, and tensor must be above 1.

    `jp.attention` exchanges the keys of tokens that `context` splits by their name. If `context` split heads or
    features instead, as a solver may choose, each device would compute the attention of all tokens.

    Raises:
      JaxparError: If it does not.
    """
    if program.name_of_piece and parallel.tensor > 1:
        return
    sizes = ", ".join(f"{axis}={size}" for axis, size in parallel.sizes.items() if size != 1)
    constrain = 'jp.constrain(x, "batch", "seq", "embed") on the stream'
    raise refuse(
        f"finding specs for context={parallel.context} in {name}, which calls jp.attention",
        rule="jp.attention exchanges the keys of tokens: context splits the dim that the model names seq, and specs "
        "are found only for tensor",
        fix=f"jp.Parallel({sizes}) without specs"
        if program.name_of_piece
        else f"{constrain}; or specs for tensor alone",
    )


def _note_on_cheapest(solver: SpecsSolver, solution: Solution, parallel: Parallel, chip: str, rows: float) -> str:
    """Explains why the cheapest choice was rejected: it leaves an axis idle, or splits no parameter."""
    axes = axes_of(parallel)
    names, shown = {*name_solution(solver, solution, axes).names.values()}, _format_axes(parallel, axes)
    instead = "the best choice that splits matmuls and parameters, without the cost of launches"
    if not solution.idle and any(name.startswith("tokens") for name in names):
        return (
            f"for {rows:g} examples a device on {chip}, splitting tokens and no parameter would be fastest, as "
            f"context={solver.n} does ({solution.cost * 1e3:.3g} ms by this model); this is {instead}"
        )
    return f"{shown} costs more than it saves for {rows:g} examples a device on {chip}, by this model: {instead}"


def find_specs_of_call(blueprint: Blueprint, parallel: Parallel) -> FoundSpecs:
    """Finds specs for a model's example call: the loss is the mean square of its results, the batch its inputs.

    Raises:
      JaxparError: As `find_specs`.
    """
    leaves, structure = jax.tree.flatten_with_path(blueprint.example)
    inputs = {_input_name(path): leaf for path, leaf in leaves}
    arrays = {name: leaf for name, leaf in inputs.items() if getattr(leaf, "shape", ()) and hasattr(leaf, "dtype")}
    batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in arrays.items()}
    _check_axes(parallel)
    check_arguments(batch, parallel, "fp32", None)  # first: no multiple of rows mends an input without examples
    replicas = parallel.data * parallel.fsdp
    if not all(leaf.shape[0] % replicas == 0 for leaf in batch.values()):
        shown = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in batch.items())
        raise refuse(
            f'specs="found" for {blueprint.name} and an example of its inputs, {shown}, over data x fsdp = {replicas}',
            rule="specs are found for a global batch, whose examples, dim 0 of each input, the replicas divide",
            fix="inputs of the shapes of a global batch in jp.from_linen(module, inputs) or jp.from_nnx(function, "
            f"inputs): dim 0 a multiple of {replicas}",
        )

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        args, kwargs = jax.tree.unflatten(structure, [batch.get(name, leaf) for name, leaf in inputs.items()])
        results = [leaf for leaf in jax.tree.leaves(model(*args, **kwargs)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum(jnp.mean(jnp.square(leaf.astype(jnp.float32))) for leaf in results)

    return find_specs(blueprint, loss, batch, parallel)


def _input_name(path: tuple[Any, ...]) -> str:
    """Returns the name of an array of an example's (args, kwargs): "input 0", "input 0['nodes']", "mask"."""
    of_kwargs, first, *rest = path
    name = first.key if of_kwargs.idx else f"input {first.idx}"
    return name + jax.tree_util.keystr(tuple(rest))


def _hardware(chip: str) -> Hardware:
    if isinstance(chip, str) and chip in HARDWARE:
        return HARDWARE[chip]
    raise refuse(f"chip={chip!r}", rule="a chip whose constants are known", fix=suggest_chip(chip, HARDWARE))


def _check_axes(parallel: Parallel) -> None:
    """Refuses a declaration with axes for which no specs are found, or without those for which they are."""
    others = {axis: size for axis, size in parallel.sizes.items() if size != 1 and axis not in ("data", "fsdp", *AXES)}
    if others or not axes_of(parallel):
        shown = ", ".join(f"{axis}={size}" for axis, size in parallel.sizes.items() if size != 1) or "no axis"
        fix = f'jp.Parallel(fsdp=2, {AXIS}=4, specs="found")'
        if (experts := others.get("expert")) is not None:
            size = parallel.tensor if parallel.tensor > 1 else experts
            fix = (
                f"jp.Parallel(expert={experts}) without specs, whose experts are read from the model's use or named by "
                f'paths; or jp.Parallel({AXIS}={size}, specs="found"), which splits experts where that costs least'
            )
        raise refuse(
            f"finding specs for {shown}",
            rule=f"specs are found for {' and '.join(AXES)}, of size 2 or more, beside data and fsdp",
            fix=fix,
        )


def _rows(parallel: Parallel, batch: Mapping[str, Any]) -> int:
    """Returns the number of examples on a device."""
    _check_axes(parallel)
    counts = {leaf.shape[0] for leaf in batch.values() if getattr(leaf, "shape", ())}
    rows, replicas = max(counts, default=0), parallel.data * parallel.fsdp
    if not rows or rows % replicas:
        raise refuse(
            f"{rows} examples over data x fsdp = {replicas}",
            rule="the replicas divide the examples of the global batch",
            fix=f"a batch of {replicas * max(1, -(-rows // replicas))} examples",
        )
    return rows // replicas


def step_costs(hardware: Hardware, parallel: Parallel, precision: str) -> StepCosts:
    """Returns the costs of work and traffic on a device of this hardware, given the sizes of all axes."""
    chip, itemsize = hardware.chip, 2 if precision == "bf16" else 4
    sizes = [parallel.sizes[axis] for axis in axes_of(parallel)] or [1]
    spans = [math.prod(sizes[number:]) for number in range(len(sizes))]  # devices that a group of an axis spans
    links = [hardware.inside if span <= hardware.per_node else hardware.between for span in spans]
    flops = chip.bf16_flops if precision == "bf16" else chip.f32_flops
    bandwidth = chip.bandwidth * hardware.streaming
    # of an element of a parameter: its update, and its gradient's sum over the axes that split examples. ZeRO does not
    # divide it, so that without a memory limit the dims are the same in every stage, and the same as in a plan
    far = hardware.inside if math.prod(sizes) * parallel.fsdp * parallel.data <= hardware.per_node else hardware.between
    replicas = parallel.data * parallel.fsdp
    seconds, sent = UPDATE / bandwidth, 2 * itemsize * (replicas - 1) / replicas
    seconds += sent / far.bandwidth
    return StepCosts(
        flops=flops * hardware.gemm.top, link=tuple(link.bandwidth for link in links), launch=hardware.launch,
        memory=bandwidth, parameter=seconds, state=STATE / (parallel.fsdp if parallel.stage else 1), replicas=replicas,
    )  # fmt: skip


def _reasons(
    solver: SpecsSolver, solution: Solution, named: NamedSpecs, memory: float | None, *, split: bool
) -> dict[str, str]:
    """Returns for each name the least cost of a step that does not split its dims, as text."""
    reasons = {}
    for name in sorted({*named.names.values()}):
        least = solver.least_without(
            [state for state, each in named.names.items() if each == name], memory=memory, split=split
        )
        reasons[name] = (
            f"without it every choice costs at least {max(0.0, least - solution.best) * 1e3:.3g} ms "
            f"({max(0.0, least / solution.best - 1):.1%}) more"
            if np.isfinite(least)
            else "nothing else fits and splits the work"
        )
    return reasons
