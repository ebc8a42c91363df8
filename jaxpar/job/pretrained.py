"""A decoder of Hugging Face begins a run, and a run's decoder is written as one."""

from pathlib import Path
from typing import Any

import jax

from jaxpar.checkpoint import listing, reading
from jaxpar.job.build import Built
from jaxpar.job.file.parse import load
from jaxpar.job.start import check_start, decoder_of
from jaxpar.models.huggingface.export import export
from jaxpar.step.state import State
from jaxpar.train import pretrained


def begin(built: Built) -> tuple[State, str]:
    """Returns the state of a new run with the parameters of `checkpoint.start_from`, and a line that says so.

    Raises:
      JaxparError: If the folder cannot be read, or does not belong to the job.
    """
    job = built.job
    found = check_start(job)
    made = pretrained.start(
        built.layout, built.optimizer, found.params, seed=job.train.seed, offload=job.train.offload
    )  # fmt: skip
    return (
        made,
        f"{len(found.params)} parameters taken from {job.checkpoint.start_from}, a {found.kind} of Hugging Face's",
    )


def write(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Writes the decoder of a checkpoint as a folder of Hugging Face's.

    Raises:
      JaxparError: If it is damaged, belongs to no run of a decoder, or Hugging Face has no such model.
    """
    path = listing.find(where, step).resolve()
    found = reading.listed(path)
    settings = decoder_of(load(path.parent.parent / "job.toml"))
    alone = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=alone)
        for name, array in found.arrays.items()
        if name.startswith("params/")
    }
    params = {name.removeprefix("params/"): value for name, value in reading.arrays(path, found, wanted).items()}
    files = export(params, settings, to)
    return {"from": str(path), "to": str(to), "bytes": sum(file.stat().st_size for file in files)}
