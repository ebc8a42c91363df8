"""A decoder of Hugging Face begins a run, and a run's decoder is written as one."""

from pathlib import Path
from typing import Any

import jax

from jaxpar.buckets import local_folder
from jaxpar.checkpoint import listing, one_model, reading
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.saved import saved
from jaxpar.data.tokens import KEPT as KEPT_TOKENIZER
from jaxpar.files import write_json
from jaxpar.job.build import Built
from jaxpar.job.file.schema import Job
from jaxpar.job.file.trained_job import job_of
from jaxpar.job.parts.batches import with_own_tokenizer
from jaxpar.job.parts.end_tokens import data_ends, end_tokens
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.start import check_start, decoder_of
from jaxpar.models.huggingface.export import export
from jaxpar.models.huggingface.folder import ALONG, CONFIG, EOS, GENERATION, end_ids, is_folder, read_config, take_along
from jaxpar.parallel.compose import as_blueprint
from jaxpar.sharding.adapters import merged
from jaxpar.sharding.names import by_path
from jaxpar.step.state import State
from jaxpar.train import pretrained

KEPT = "huggingface"  # the folder in a run's that has the small files of the model it began with


def begin(built: Built) -> tuple[State, str]:
    """Returns the state of a new run with the parameters of `checkpoint.start_from`, and a line that says so.

    Raises:
      JaxparError: If the folder cannot be read, or does not belong to the job.
    """
    job = built.job
    found, origin = check_start(job, built.layout)
    params = {new: found.params[old] for new, old in origin.taken.items()}
    made = pretrained.start(
        built.layout, built.optimizer, params, fresh=origin.fresh, seed=job.train.seed, offload=job.train.offload
    )  # fmt: skip
    if jax.process_index() == 0:  # the folder may be gone when the run is exported
        source, to = Path(job.checkpoint.start_from).expanduser(), local_folder(job.run.dir) / KEPT
        take_along(source, to, names=(CONFIG, *ALONG))
    return made, f"{origin}, a {found.kind} of Hugging Face's"


def _write_ends(job: Job, run: Path, to: Path) -> None:
    """Writes the tokens that end a text of the run, which programs that generate stop at, into what was exported."""
    ends = [each for each in end_tokens(job, run, run / KEPT) if each < decoder_of(job).vocab]
    if not set(data_ends(job, run)) <= set(end_ids(to)):
        for file in (to / CONFIG, to / GENERATION):
            if file.is_file():
                write_json(file, read_config(file) | {EOS: ends if ends[1:] else ends[0]})


def _write_tokenizer(source: Path, to: Path) -> list[Path]:
    """Writes the tokenizer of a run that began with no folder, and the token that begins a text."""
    if (begin := saved(source).id_of("bos_token")) is not None:
        write_json(to / CONFIG, read_config(to / CONFIG) | {"bos_token_id": begin})
    return take_along(source, to)


def write(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Writes the decoder of a checkpoint, as the run evaluates it, as a folder of Hugging Face's, its adapters merged.

    What the run's own folder of Hugging Face's has besides, tokenizer, special ids and generation config, is written
    too; of a run that began with none, the tokenizer that it was trained with. As ends of a text it has those of the
    run's own documents and answers.

    Raises:
      JaxparError: If it is damaged, belongs to no run of a decoder, or Hugging Face has no such model.
    """
    path = listing.find(where, step).resolve()
    found = reading.listed(path)
    run = path.parent.parent
    job = with_own_tokenizer(job_of(run), run)
    settings = decoder_of(job)
    alone = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=alone)
        for name, array in one_model.described(found.arrays, found.replicas).items()
        if name.startswith("params/")
    }
    params = {name.removeprefix("params/"): value for name, value in one_model.read(path, found, wanted).items()}
    if job.train.adapters.rank:
        params = by_path(merged(as_blueprint(resolve_model(job, resolve_loss(job))), params))
    files = export(params, settings, to, origin=run / KEPT if is_folder(run / KEPT) else None)
    if not is_folder(run / KEPT) and job.data.tokenizer not in OURS:
        files += _write_tokenizer(run / "data" / KEPT_TOKENIZER, to)
    if job.data.is_text:
        _write_ends(job, run, to)
    return {"from": str(path), "to": str(to), "bytes": sum(file.stat().st_size for file in files)}
