"""The best cut of a chain into parts, by dynamic programming: what the planner's and the partitioner's are held to."""

from itertools import accumulate


def balance(costs, parts):
    """Returns where a chain is cut into parts so that the most expensive part is as cheap as possible.

    The result is the index of the first layer of every part, and at last the number of layers.

    Source: the linear partition problem: the most expensive of k parts of the first n layers is, at best, the least
    over i of max(that of k-1 parts of the first i, the sum of the rest).
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]
    best = {n: (sums[n], (0, n)) for n in range(1, count + 1)}
    for k in range(2, parts + 1):
        best = {
            n: min((max(best[i][0], sums[n] - sums[i]), (*best[i][1], n)) for i in range(k - 1, n))
            for n in range(k, count + 1)
        }
    return best[count][1]
