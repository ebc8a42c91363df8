"""A decoder of Hugging Face begins a run, and a run's decoder is written as one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.build import Built
from jaxpar.job.models import resolve_loss, resolve_model
from jaxpar.job.schema import load
from jaxpar.job.tables import Job
from jaxpar.models.decoder import DecoderSettings
from jaxpar.models.huggingface.config import config_of
from jaxpar.models.huggingface.export import export
from jaxpar.models.huggingface.load import load as load_folder
from jaxpar.train import pretrained
from jaxpar.train.checkpoint import Checkpoints, arrays, manifest, shelf
from jaxpar.train.state import State

FREE = ("dropout", "scan")  # settings that change no number of a trained model


def is_folder(path: str) -> bool:
    """Returns whether a path is a folder of Hugging Face's."""
    return bool(path) and (Path(path).expanduser() / "config.json").is_file()


def begin(built: Built) -> tuple[State, str]:
    """Returns the state of a new run with the parameters of `checkpoint.start_from`, and a line that says so.

    Raises:
      JaxparError: If the folder cannot be read, the job has another model, or only a part of it is wanted.
    """
    job, spec = built.job, built.job.checkpoint
    usual = Checkpoints()
    if (spec.take, spec.rename, spec.cast) != (usual.take, usual.rename, usual.cast):
        raise refuse(
            f"checkpoint.take, rename or cast with {spec.start_from}",
            rule="a model of Hugging Face's is taken whole",
            fix="train it for no step, then start_from that run",
        )
    found = load_folder(spec.start_from)
    mine = decoder_of(job)
    other = _other(mine, found.settings)
    if other:
        has = ", ".join(f"{key} = {getattr(mine, key)!r}" for key in other)
        table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in other.items())
        raise JaxparError(Problem(f"[model] of the job has {has}", f"{spec.start_from} has another model", table))
    made = pretrained.start(
        built.layout, built.optimizer, found.params, seed=job.train.seed, offload=job.train.offload
    )  # fmt: skip
    return made, f"{len(found.params)} parameters taken from {spec.start_from}, a {found.kind} of Hugging Face's"


def _other(mine: DecoderSettings, theirs: DecoderSettings) -> dict[str, Any]:
    """Returns the settings that make another model of theirs; 0 and the number that it stands for are the same."""
    config = config_of(mine, "float32")
    differ = {
        field.name: getattr(theirs, field.name)
        for field in dataclasses.fields(theirs)
        if getattr(mine, field.name) != getattr(theirs, field.name) and field.name not in FREE
    }
    return {
        key: value
        for key, value in differ.items()
        if config_of(dataclasses.replace(mine, **{key: value}), "float32") != config
    }


def write(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Writes the decoder of a checkpoint as a folder of Hugging Face's.

    Raises:
      JaxparError: If it is damaged, belongs to no run of a decoder, or Hugging Face has no such model.
    """
    path = shelf.find(where, step).resolve()
    if shelf.is_older(path):
        raise shelf.refuse_older(path)
    if wrong := manifest.check(path):
        raise JaxparError(*(Problem(f"{path}: {each}", "every byte is as written", "another step") for each in wrong))
    settings = decoder_of(load(path.parent.parent / "job.toml"))
    listed = manifest.read(path).arrays
    alone = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=alone)
        for name, array in listed.items()
        if name.startswith("params/")
    }
    params = {name.removeprefix("params/"): value for name, value in arrays.load(path, listed, wanted).items()}
    files = export(params, settings, to)
    return {"from": str(path), "to": str(to), "bytes": sum(file.stat().st_size for file in files)}


def decoder_of(job: Job) -> DecoderSettings:
    """Returns the settings of the job's decoder.

    Raises:
      JaxparError: If its model is another.
    """
    if job.model["name"] != "decoder":
        raise refuse(
            f"model.name = {job.model['name']!r}",
            rule="Hugging Face's Llama and GPT-2 are read and written for jaxpar's decoder",
            fix='model.name = "decoder"',
        )
    model: Any = resolve_model(job, resolve_loss(job))
    return model.args[0]
