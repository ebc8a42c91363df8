"""Finds sums that several devices have to add up.

results that are only added to each other   XLA adds their partial sums, and reduces only once
sums over examples in the forward pass      of replicas, each of which then has the whole sum
"""

from collections.abc import Iterator

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
    """Yields large results of matmuls and lookups of the forward pass that sum over the examples of a batch.

    Example: a mixture that scatters the tokens of all examples to one buffer per expert.
    """
    for operation in program.operations:
        summed = (operands for operands, result in operation.loops if result is None)
        large = operation.result.bytes * operation.times > STATISTICS
        if large and not operation.backward and any(piece in program.rows for operands in summed for piece in operands):
            yield operation.result
