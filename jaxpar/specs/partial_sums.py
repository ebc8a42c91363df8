"""Finds sums that several devices have to add up.

results that are only added to each other   XLA adds their partial sums, and reduces only once
sums over examples in the forward pass      of replicas, each of which then has the whole sum
"""

from collections.abc import Iterator

from jaxpar.sharding.infer_names.dim_pieces import flat
from jaxpar.specs.program import Array, TracedProgram

STATISTICS = 2**18  # most bytes of a sum over examples that is not worth a word, such as the means of a batch norm


def sums_of_results(program: TracedProgram) -> dict[int, tuple[Array, list[Array]]]:
    """Returns the groups of results that are only added to each other: (the sum, its terms) by the id of the sum.

    All terms must be results of operations, and have no other reader: before another use, a partial sum is reduced.
    """
    results = {id(operation.result) for operation in program.operations}
    terms: dict[int, list[Array]] = {}
    for total, operands in program.additions:
        parts = []
        for operand in operands:
            if operand.readers != 1:
                break
            if id(operand) in terms:
                parts += terms[id(operand)]
            elif id(operand) in results:
                parts.append(operand)
            else:
                break
        else:
            for operand in operands:
                terms.pop(id(operand), None)
            terms[id(total)] = parts
    totals = {id(array): array for array, _ in program.additions}
    return {key: (totals[key], members) for key, members in terms.items()}


def sums_over_examples(program: TracedProgram) -> Iterator[Array]:
    """Yields large results of the forward pass that sum over the examples of a batch and have no dim of examples.

    Example: a mixture that scatters the tokens of all examples to one buffer per expert.
    """
    for operation in program.operations:
        result, rows = operation.result, program.rows
        if (
            operation.backward
            or operation.equation.primitive.name == "gather"
            or result.bytes * operation.times < STATISTICS
        ):
            continue
        summed = {piece for operands, made in operation.loops if made is None for piece in operands}
        if summed & rows and not any(piece in rows for dim in result.dims for piece in flat(dim)):
            yield result
