"""Finds results of operations that are only added to each other: XLA adds their partial sums, and reduces only once."""

from jaxpar.specs.program import Array, TracedProgram


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
