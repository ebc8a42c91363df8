"""Checks a batch before it goes to the devices: finite numbers, ids in range, the arrays of the first batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.data.spec import Batch, Rows
from jaxpar.errors import JaxparError, refuse


class CorruptBatch(JaxparError):
    """A batch with wrong arrays, wrong dtypes, ids out of range or numbers that are not finite."""


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The checks of a batch.

    Attributes:
      id_counts: Number of ids by name of the array, whose integers lie within 0..count-1. In `targets` and `labels`,
        which only the loss reads, ids under a `mask` of 0 are not checked.
      first_batch: Arrays of the first batch by name; later ones have their dtypes and numbers of dims, but any length.
    """

    id_counts: Mapping[str, int] = field(default_factory=dict)
    first_batch: Mapping[str, Any] = field(default_factory=dict)

    def check(self, batch: Batch, describe_row: Callable[[int], str], rows: Rows = None) -> Batch:
        """Returns the batch if it passes. Reads each array twice (minimum, maximum) and makes no copy.

        Args:
          batch: Arrays by name.
          describe_row: Maps a row of the global batch to a description of where it comes from.
          rows: The rows of the global batch in `batch`; None means all.

        Raises:
          CorruptBatch: With the array, the row and where it comes from.
        """
        if self.first_batch and batch.keys() != self.first_batch.keys():
            got = f"it has {', '.join(batch)}, the first had {', '.join(self.first_batch)}"
            raise _corrupt(got, "every batch has the same arrays", "the same keys in every batch")
        for name, value in batch.items():
            like = self.first_batch.get(name)
            if like is not None and (value.dtype, value.ndim) != (like.dtype, len(like.shape)):
                first = f"{like.dtype}{list(like.shape)}"
                got = f"{name} is {value.dtype}{list(value.shape)}, in the first batch it was {first}"
                raise _corrupt(got, "dtypes and numbers of dims stay what they are", f"{name} as {first}")
            if value.size:
                self._check_numbers(name, batch, describe_row, rows)
        return batch

    def _check_numbers(self, name: str, batch: Batch, lies: Callable[[int], str], rows: Rows) -> None:
        value = batch[name]
        if value.dtype.kind in "iu" and name in self.id_counts:
            count = self.id_counts[name]
            if 0 <= value.min() and value.max() < count:
                return
            wrong = (value < 0) | (value >= count)
            mask = batch.get("mask")
            if name in ("targets", "labels") and mask is not None and mask.shape == wrong.shape:
                wrong &= mask != 0
            rule, fix = f"{name} are within 0..{count - 1}", "other data, or a model with as many ids"
        elif value.dtype.kind not in "biu":
            with np.errstate(invalid="ignore"):
                # a complex number with one part that is not finite may be neither the minimum nor the maximum
                if value.dtype.kind != "c" and np.isfinite(value.min()) and np.isfinite(value.max()):
                    return
                wrong = ~np.isfinite(value)
            rule, fix = f"{name} are finite numbers", "other data, or a mask and 0 for what is missing"
        else:
            return
        if wrong.any():
            position = tuple(int(i) for i in np.argwhere(wrong)[0])
            row = position[0] if rows is None else int(rows[position[0]])
            got = f"{name}{[row, *position[1:]]} is {value[position]} (row {row}, {lies(row)}; {int(wrong.sum())} such)"
            raise _corrupt(got, rule, fix)


def _corrupt(got: str, rule: str, fix: str) -> CorruptBatch:
    return CorruptBatch(*refuse(got, rule=rule, fix=fix).problems)
