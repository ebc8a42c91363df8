"""Finds how `context` and `tensor` would split a model that is no decoder, for a plan."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from jax.extend.core import Jaxpr

from jaxpar.errors import JaxparError
from jaxpar.job.parts.plan_sequences import trace_sequences
from jaxpar.mesh.collective import wire_bytes
from jaxpar.parallel.declaration import Parallel
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.model.kernel_order import REDUCED
from jaxpar.plan.model.splits import AXES, ModelSplit, Sizes, SplitTraffic
from jaxpar.plan.model.tracing import Context
from jaxpar.sharding.names import Blueprint
from jaxpar.specs.collectives import RepeatedCollective
from jaxpar.specs.find import choose_dims, step_costs
from jaxpar.specs.names import NamedSpecs, name_solution
from jaxpar.specs.optimize import Solution
from jaxpar.specs.partial_sums import sums_over_examples
from jaxpar.specs.program import TracedProgram
from jaxpar.specs.sequences import SequenceShares, sequences_split
from jaxpar.specs.shares import ArrayShares, Shares
from jaxpar.specs.trace import TracedLoss

MOST_TENSOR, MOST_CONTEXT = 8, 16  # largest sizes that a plan tries for a model that is no decoder


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundSplit:
    """A split of a model by sizes of `context` and `tensor`.

    Attributes:
      split: Its traffic.
      names: Names of the dims that were found; None if the model names all dims that are split.
      shares: The share of each array that a device holds.
      trace_context: Context manager in which the split program is traced.
    """

    split: ModelSplit
    names: NamedSpecs | None
    shares: Shares
    trace_context: Context = nullcontext


@dataclass(frozen=True, kw_only=True, eq=False)
class _FoundDims:
    """The dims that were found for sizes of `context` and `tensor`.

    Attributes:
      traffic: Their traffic.
      names: Names of the dims.
      shares: The share of each array that a device holds.
      solution: The solution.
    """

    traffic: tuple[SplitTraffic, ...]
    names: NamedSpecs
    shares: ArrayShares
    solution: Solution

    def split(self) -> FoundSplit:
        """Returns the split of the model."""
        return FoundSplit(split=ModelSplit(traffic=self.traffic), names=self.names, shares=self.shares)


def find_splits(
    blueprint: Blueprint,
    loss: Callable,
    batch: Mapping[str, Any],
    *,
    rows: int,
    devices: int,
    sizes: Collection[int],
    precision: str,
    frozen: Collection[str],
) -> tuple[Mapping[Sizes, FoundSplit], tuple[str, ...]]:
    """Returns the splits of a model by sizes of `context` and `tensor`, and sentences.

    The sentences say which sizes are left out and why, and what of the model has no price.

    Args:
      blueprint: The model.
      loss: A function of (model, batch), or of (model, batch, key).
      batch: Shapes and dtypes by name; the first dim is that of examples.
      rows: Examples of the global batch; the dims are chosen for those of a device without microbatches, as in a run.
      devices: Number of devices.
      sizes: Sizes to try, of at least 2; `MOST_TENSOR` and `MOST_CONTEXT` bound those of each axis.
      precision: Dtype of matmuls: "fp32" or "bf16".
      frozen: Patterns of the paths of frozen parameters.
    """
    sizes, islands, whole_batch = [*sizes], set[str](), set[str]()
    if not sizes:
        return {}, ()

    @cache
    def program(local: int) -> TracedProgram:
        traced = TracedLoss(blueprint, loss, batch, rows=local, precision=precision)
        followed = traced.program(frozen)
        islands.update(traced.islands)
        lines = (array.line for array in sums_over_examples(followed) if array.line)
        whole_batch.update(f"{Path(line.file).name}:{line.line}" for line in lines)
        return followed

    def local_rows(split: int) -> int:
        return max(1, rows * split // devices)

    def find(context: int, tensor: int) -> _FoundDims | None:
        split = context * tensor
        return _find(program(local_rows(split)), (context, tensor), local_rows(split), devices // split, precision)

    found: dict[Sizes, _FoundDims] = {}
    idle, equal = [], []
    for size in (size for size in sizes if size <= MOST_TENSOR):
        if (split := find(1, size)) is not None:
            found[1, size] = split
    contexts = [size for size in sizes if size <= MOST_CONTEXT and _divides(size, rows, devices)]
    if min(sizes) <= MOST_CONTEXT:
        program(local_rows(contexts[0] if contexts else min(sizes)))  # records the islands
    if "attention" in islands:  # its keys are those of tokens that `context` splits as the model names them
        pairs = [
            (context, tensor)
            for context, tensor in product(sizes, [1, *(size for _, size in found)])
            if context <= MOST_CONTEXT and _divides(context * tensor, rows, devices)
        ]
        named, sentences = _named_splits(
            blueprint, loss, batch, pairs, rows=rows, devices=devices, precision=precision, frozen=frozen
        )
        splits = {sizes: dims.split() for sizes, dims in found.items()} | named
        return splits, (*sentences, *_sentence_on_sums(whole_batch))
    for size in contexts:
        split, of_tensor = find(size, 1), found.get((1, size))
        if split is not None and of_tensor is not None and split.solution.axes == of_tensor.solution.axes:
            equal.append(size)
        elif split is None or not splits_tokens(split.names, "context"):
            idle.append(size)
        else:
            found[size, 1] = split
    pairs = _pairs_to_find(sizes, [size for context, size in found if context == 1], rows, devices)
    for pair in pairs:
        if (dims := find(*pair)) is not None and any(splits_tokens(dims.names, axis) for axis in AXES):
            found[pair] = dims
    no_splits = _sentences_on_sizes(found, idle, equal, pairs, scarce=rows < devices)
    return {sizes: dims.split() for sizes, dims in found.items()}, (*no_splits, *_sentence_on_sums(whole_batch))


def _sentences_on_sizes(
    found: Collection[Sizes], idle: Collection[int], equal: Collection[int], pairs: Collection[Sizes], *, scarce: bool
) -> list[str]:
    """Returns sentences on the sizes that are left out: of `context` alone, and with `tensor`.

    `scarce` says that there are fewer examples than devices.
    """
    sentences = (
        ("splits no activation along a dim of the batch, such as tokens", idle),
        ("the solver splits the same dims for it as for tensor", equal),
    )
    no_splits = [f"context {', '.join(map(str, given))}: {reason}" for reason, given in sentences if given]
    if all(any(sizes[number] > 1 for sizes in found) for number in range(len(AXES))):
        shown = ", ".join(f"{context} with {tensor}" for context, tensor in pairs)
        tried = (
            f"only {shown}, the smallest sizes with which the replicas divide the examples; jp.find_specs finds dims "
            "for others"
            if pairs
            else "at no such sizes do the replicas divide the examples"
            if scarce
            else "a plan tries both only for fewer examples than devices; jp.find_specs finds dims for both"
        )
        no_splits.append(f"context with tensor: {tried}")
    return no_splits


def _sentence_on_sums(lines: Collection[str]) -> list[str]:
    if not lines:
        return []
    return [
        f"sums over examples: {', '.join(sorted(lines))} adds up the examples of the whole batch in one array, which "
        "every replica then has whole: its work and traffic are planned as for the examples of one device, and are more"
    ]


def _divides(split: int, rows: int, devices: int) -> bool:
    """Whether this many devices share a model evenly, and the replicas then divide the examples."""
    return devices % split == 0 and rows % (devices // split) == 0


def _pairs_to_find(contexts: Collection[int], tensors: Collection[int], rows: int, devices: int) -> list[Sizes]:
    """Returns the pairs (context, tensor) for which a plan finds dims of both axes together.

    There are none if a step has at least as many examples as devices. Otherwise the pairs have the smallest product
    with which the replicas divide the examples, because replicas send less than devices that share an example. Either
    axis may split tokens: inside of a node (4, 2) is (2, 4) with other names. `context` is the outer axis, which leaves
    a node first.
    """
    if rows >= devices:
        return []
    pairs = [
        (context, tensor)
        for context, tensor in product(contexts, tensors)
        if context <= tensor and _divides(context * tensor, rows, devices)
    ]
    least = min((math.prod(pair) for pair in pairs), default=0)
    return [pair for pair in pairs if math.prod(pair) == least]


def _named_splits(
    blueprint: Blueprint,
    loss: Callable,
    batch: Mapping[str, Any],
    pairs: Collection[Sizes],
    *,
    rows: int,
    devices: int,
    precision: str,
    frozen: Collection[str],
) -> tuple[dict[Sizes, FoundSplit], tuple[str, ...]]:
    """Returns the splits by `context` of tokens as a model names them, alone and with dims found for `tensor`.

    Also returns sentences on what is left out. `pairs` are the sizes of (context, tensor) to try.

    A device of `context` has a part of each sequence, which costs as much as a part of the rows: the dims for `tensor`
    are found as for that many more replicas, once for all sizes of `context`.
    """
    if not pairs:
        return {}, ("context: with none of its sizes the replicas divide the examples",)
    sizes = sorted({context for context, _ in pairs})
    trace, reason = trace_sequences(blueprint, loss, batch, sizes=sizes, precision=precision)
    if trace is None:
        return {}, (f"context: {reason}",)
    pairs = [pair for pair in pairs if pair[0] in trace.sizes]
    traced_in = partial(sequences_split, blueprint)
    found = {
        (context, 1): FoundSplit(
            split=ModelSplit(traffic=trace.traffic()),
            names=None,
            shares=SequenceShares(context),
            trace_context=traced_in,
        )
        for context, n in pairs
        if n == 1
    }
    alone: list[int] = []
    for n in sorted({tensor for _, tensor in pairs if tensor > 1}):
        local = rows * n / devices
        program = TracedLoss(blueprint, loss, batch, rows=local, precision=precision, sequences=True).program(frozen)
        dims = _find(program, (1, n), local, devices // n, precision)
        if dims is None:
            alone.append(n)
            continue
        keys = trace.traffic(dims.shares)
        for size in (context for context, tensor in pairs if tensor == n):
            sent = tuple(replace(each, payload_per_row=each.payload_per_row / size) for each in dims.traffic)
            found[size, n] = FoundSplit(
                split=ModelSplit(traffic=(*keys, *sent)), names=dims.names,
                shares=_product(SequenceShares(size), dims.shares), trace_context=traced_in,
            )  # fmt: skip
    sentences = ["context_by ring and ulysses: priced for decoders; keys are gathered"]
    if alone:
        sentences.append(f"context with tensor {', '.join(map(str, alone))}: tensor splits no parameter beside it")
    return found, tuple(sentences)


def _product(first: Shares, second: Shares) -> Shares:
    """Returns the shares of a device of two axes, which split different dims."""

    def shares(
        jaxpr: Jaxpr, paths: Sequence[str], batch: Sequence[int], gradients: Sequence[int]
    ) -> Callable[[Any], float]:
        of_first, of_second = (each(jaxpr, paths, batch, gradients) for each in (first, second))
        return lambda variable: of_first(variable) * of_second(variable)

    return shares


def _find(program: TracedProgram, sizes: Sizes, rows: float, replicas: int, precision: str) -> _FoundDims | None:
    """Returns the split by these sizes; None if no dims can be cut so, or `tensor` would cut no parameter.

    As in a run, a parameter costs its update and the sum of its gradient over the replicas, here those of `data`.
    """
    by_axis = {axis: size for axis, size in zip(AXES, sizes, strict=True) if size > 1}
    costs = step_costs(HARDWARE["h100"], Parallel(data=replicas, context=sizes[0], tensor=sizes[1]), precision)
    needs_parameters = "tensor" in by_axis
    try:
        # both=False: a plan weighs each split with fsdp too, beside which two axes must not cut one dim together
        solver, solution, _ = choose_dims(
            program, tuple(by_axis.values()), costs, parameters=needs_parameters, both=False
        )
    except JaxparError:  # no dims of the model can be cut so: the plan has no layout of this size
        return None
    if needs_parameters and not solver.splits_parameters(solution):
        return None
    axes = tuple(by_axis)
    traffic = tuple(
        _traffic(sent, axes[sent.axis], by_axis[axes[sent.axis]], rows)
        for sent in _combine_sums(solution.collectives, [*by_axis.values()])
    )
    return _FoundDims(
        traffic=traffic,
        names=name_solution(solver, solution, axes),
        shares=ArrayShares(solver, solution),
        solution=solution,
    )


def splits_tokens(names: NamedSpecs, axis: str) -> bool:
    """Whether an axis splits a dim of an activation that is one of the batch, by the names that were found."""
    given = {name for dims in names.activations.values() for name in dims if name}
    return any(axis in names.axes.get(name, ()) for name in given if name.split("_")[0] == "tokens")


def _traffic(sent: RepeatedCollective, axis: str, size: int, rows: float) -> SplitTraffic:
    payload = sent.bytes * size / (size - 1) / (2 if sent.kind == "all-reduce" else 1)
    per_row = payload / rows if sent.of_examples else 0.0
    constant = 0.0 if sent.of_examples else payload
    return SplitTraffic(
        axis=axis, kind=sent.kind, payload_per_row=per_row, payload=constant, times=sent.times,
        is_recomputed=sent.is_recomputed, backward=sent.backward,
    )  # fmt: skip


def _combine_sums(collectives: Iterable[RepeatedCollective], sizes: Sequence[int]) -> Iterator[RepeatedCollective]:
    """Yields the collectives, with all-reduces of one pass and loop that do not depend on the examples combined.

    These are sums of gradients, and of the loss. XLA combines them up to some bytes; none of them is recomputed.
    `sizes` are those of the axes.
    """
    sums: defaultdict[tuple[int, bool, float], float] = defaultdict(float)
    for sent in collectives:
        if sent.kind == "all-reduce" and not sent.of_examples:
            sums[sent.axis, sent.backward, sent.iterations] += sent.bytes * sent.times / sent.iterations
        else:
            yield sent
    for (axis, backward, iterations), total in sums.items():
        payload = total / wire_bytes("all-reduce", 1.0, sizes[axis])
        count = max(1, math.ceil(payload / REDUCED))
        yield RepeatedCollective(
            axis=axis, kind="all-reduce", bytes=total / count, times=count * iterations, of_examples=False,
            backward=backward, iterations=iterations,
        )  # fmt: skip
