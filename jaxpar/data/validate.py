"""Checks a batch before it is fed: numbers, in range, shaped as the batches before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.data.spec import Batch, Rows
from jaxpar.errors import JaxparError, refuse


class CorruptBatch(JaxparError):
    """A batch that holds what cannot be."""


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The properties of a good batch.

    Attributes:
      below: Name to the count of its ids: whole numbers within 0..count-1. Those that a `mask` of 0 leaves out
        do not matter in `targets` and `labels`, which only the loss reads.
      like: Name to the shape and dtype of the first batch; lengths may vary, dtypes and numbers of dims not.
    """

    below: Mapping[str, int] = field(default_factory=dict)
    like: Mapping[str, Any] = field(default_factory=dict)

    def checked(self, batch: Batch, lies: Callable[[int], str], rows: Rows = None) -> Batch:
        """Returns a batch that is sound. Reads each array twice (lowest, highest) and makes no copy.

        Args:
          batch: Name to array.
          lies: Row of the whole batch to where it lies, in words.
          rows: Which rows of the whole batch these are; None means all.

        Raises:
          CorruptBatch: With the array, the row and where it lies.
        """
        if self.like and batch.keys() != self.like.keys():
            got = f"it has {', '.join(batch)}, the first had {', '.join(self.like)}"
            raise _corrupt(got, "every batch has the same arrays", "the same keys in every batch")
        for name, value in batch.items():
            like = self.like.get(name)
            if like is not None and (value.dtype, value.ndim) != (like.dtype, len(like.shape)):
                first = f"{like.dtype}{list(like.shape)}"
                got = f"{name} is {value.dtype}{list(value.shape)}, in the first batch it was {first}"
                raise _corrupt(got, "dtypes and numbers of dims stay what they are", f"{name} as {first}")
            if value.size:
                self._check_numbers(name, batch, lies, rows)
        return batch

    def _check_numbers(self, name: str, batch: Batch, lies: Callable[[int], str], rows: Rows) -> None:
        value = batch[name]
        if value.dtype.kind in "iu" and name in self.below:
            count = self.below[name]
            if 0 <= value.min() and value.max() < count:
                return
            wrong = (value < 0) | (value >= count)
            mask = batch.get("mask")
            if name in ("targets", "labels") and mask is not None and mask.shape == wrong.shape:
                wrong &= mask != 0
            rule, fix = f"{name} are within 0..{count - 1}", "other data, or a model with as many ids"
        elif value.dtype.kind not in "biu":
            with np.errstate(invalid="ignore"):
                # a complex number that is not finite in one of its parts may be neither the lowest nor the highest
                if value.dtype.kind != "c" and np.isfinite(value.min()) and np.isfinite(value.max()):
                    return
                wrong = ~np.isfinite(value)
            rule, fix = f"{name} are finite numbers", "other data, or a mask and 0 for what is missing"
        else:
            return
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            row = at[0] if rows is None else int(rows[at[0]])
            got = f"{name}{[row, *at[1:]]} is {value[at]} (row {row}, {lies(row)}; {int(wrong.sum())} such)"
            raise _corrupt(got, rule, fix)


def _corrupt(got: str, rule: str, fix: str) -> CorruptBatch:
    return CorruptBatch(*refuse(got, rule=rule, fix=fix).problems)
