"""Finds results of operations that are only added to each other: their partial sums are reduced once, as one sum."""

from jaxpar.specs.program import Array, TracedProgram


def sums_of_results(program: TracedProgram) -> dict[int, tuple[Array, list[Array]]]:
    """Returns the groups of results that are only added to each other: (the sum, its terms) by the sum's identity.

    A partial sum that is added to an array which is none costs its collective first; so every reader of a term is the
    addition.
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
