"""Results that the names of their line cut along another dim than a strategy of their operation, or leave whole.

    operand  [batch, heads/n, q, k]      ──┐
    operand  [batch, heads, k, features] ──┴─►  result [batch, heads, q, features], whole by its names

A constraint holds for the operation itself: XLA gathers the first operand, and each device computes the whole result,
even if the operand is much larger, as the gradient of scores is beside that of queries. If the result is cut along q by
its names, XLA exchanges the first operand. Only if both operands are cut along heads, XLA computes a shard of the
result on each device, and gathers or exchanges it. So only then a strategy may cut another dim than the names.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from jaxpar.specs.collectives import State, States, is_cut
from jaxpar.specs.program import Array, Operation
from jaxpar.specs.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class GatheredOperand:
    """An operand that XLA gathers over an axis, if the axis cuts it.

    Attributes:
      axis: Index of the axis.
      operand: The operand.
      state: The class of its dims that the axis cuts.
      other: The class of the other operand's dims: if the axis cuts these too, the result is gathered; None if that
        operand has no such dim.
    """

    axis: int
    operand: Array
    state: State
    other: State


def gathered_operands(
    operation: Operation,
    strategies: Sequence[Strategy],
    source: States,
    target: States,
    states_of: Callable[[Array, int], Collection[State]],
) -> Iterator[GatheredOperand]:
    """Yields the operands that XLA gathers for the result of a matmul or a convolution that is left whole.

    Args:
      operation: The operation.
      strategies: The ways to split it.
      source: The states in which a strategy computes the result.
      target: The states of the result by its names.
      states_of: Maps an array and an axis to the classes of dims along which the axis may cut the array.
    """
    for axis, (made, named) in enumerate(zip(source, target, strict=True)):
        if not operation.flop or not is_cut(made) or named is not None:  # of a lookup XLA gathers the result
            continue
        read = _states_read(strategies, axis, made)
        if read is None:
            continue
        pairs = zip(operation.operands, read, strict=True)
        cut = [(operand, state) for operand, state in pairs if _may_be_cut(operand, state, axis, states_of)]
        for index, (operand, state) in enumerate(cut):
            other = cut[1 - index][1] if len(cut) == 2 else None
            yield GatheredOperand(axis=axis, operand=operand, state=state, other=other)


def cuts_of_exchange(
    operation: Operation,
    strategies: Sequence[Strategy],
    source: States,
    target: States,
    states_of: Callable[[Array, int], Collection[State]],
) -> list[tuple[int, State]] | None:
    """Returns the cuts of both operands without which XLA does not exchange a result: (axis, class of dims) each.

    Args:
      operation: A matmul, convolution or lookup.
      strategies: The ways to split it.
      source: The states in which a strategy computes the result.
      target: The states of the result by its names.
      states_of: Maps an array and an axis to the classes of dims along which the axis may cut the array.

    Returns:
      [] if no cuts are required: the result is that of a lookup, or its names cut it as the strategy does. None if XLA
      never exchanges it.
    """
    found: list[tuple[int, State]] = []
    for axis, (made, named) in enumerate(zip(source, target, strict=True)):
        if operation.flop and is_cut(made) and is_cut(named) and made != named:
            read = _states_read(strategies, axis, made) or ()
            pairs = [*zip(operation.operands, read, strict=False)]
            if len(pairs) < 2 or not all(_may_be_cut(operand, state, axis, states_of) for operand, state in pairs):
                return None
            found += [(axis, state) for state in read]
    return found


def _states_read(strategies: Sequence[Strategy], axis: int, made: State) -> tuple[State, ...] | None:
    """Returns the states in which an operation reads its operands to make a state of its result.

    Returns None if that is ambiguous: two dims of the result are the same, as in the sum of a matrix and its transpose.
    """
    read = {tuple(states[axis] for states in each.operands) for each in strategies if each.result[axis] == made}
    return next(iter(read)) if len(read) == 1 else None


def _may_be_cut(operand: Array, state: State, axis: int, states_of: Callable[[Array, int], Collection[State]]) -> bool:
    return not operand.constant and state is not None and state in states_of(operand, axis)
