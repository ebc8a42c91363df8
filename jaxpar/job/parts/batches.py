"""The batches of a job: their source, their shapes without reading data, and the tokens that end documents."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpar.buckets import local_folder
from jaxpar.data import sources as data
from jaxpar.data.spec import OURS, Source
from jaxpar.data.streams.sets import EvaluationSet, open_set
from jaxpar.data.tokenizers.chat_template import conversation, load_template
from jaxpar.data.tokenizers.encoders import END, end_token, load
from jaxpar.data.tokenizers.tokenizer_facts import TokenizerFacts, read_tokenizer
from jaxpar.data.tokens import TOKENIZER_FOLDER
from jaxpar.errors import JaxparError, refuse
from jaxpar.job.file.imports import import_object
from jaxpar.job.file.schema import Job
from jaxpar.models.huggingface.folder import end_ids
from jaxpar.parallel.declaration import Parallel


def open_data(job: Job) -> Source:
    """Opens the source of a job's batches."""
    source, evaluation = (
        import_object(name, key, allowed=job.allow_import) if ":" in name else None
        for name, key in ((job.data.source, "data.source"), (job.data.evaluation, "data.evaluation"))
    )
    return data.open_data(
        job.data, local_folder(job.run.dir or ".") / "data", seed=job.train.seed, named=source, held_out=evaluation
    )


def with_saved_tokenizer(job: Job, folder: Path) -> Job:
    """Makes a run's job use the tokenizer saved in its folder, because the original one may be gone or changed.

    Args:
      job: The job of the run folder.
      folder: The run folder.
    """
    if not job.data.is_text or job.data.tokenizer in OURS:
        return job
    return replace(job, data=replace(job.data, tokenizer=str(folder / "data" / TOKENIZER_FOLDER)))


def open_sets(job: Job) -> dict[str, EvaluationSet]:
    """Opens the evaluation sets of a job, by name.

    Raises:
      JaxparError: If one cannot be read, or has no examples.
    """
    folder, sets = local_folder(job.run.dir or ".") / "data", {}
    for name, table in job.data.sets.items():
        source, key = str(table.get("source", "")), f"data.sets.{name}.source"
        custom_source = import_object(source, key, allowed=job.allow_import) if ":" in source else None
        sets[name] = open_set(job.data, name, folder, job.train.global_batch, named=custom_source)
    return sets


def check_evaluated(job: Job, source: Source | None) -> None:
    """Refuses a job with evaluations whose source has no held-out examples, or that has no source (None)."""
    keys = {"train.eval_every": job.train.eval_every, "checkpoint.keep_best": job.checkpoint.keep_best}
    requests = [f"{key} = {value}" for key, value in keys.items() if value]
    if not requests or job.data.sets or (source is not None and source.evaluation(0, job.train.global_batch)):
        return
    is_custom = ":" in job.data.source
    fix = "evaluation(index, size) in it, or data.evaluation" if is_custom else "data.held_out = 0.1, or more examples"
    raise refuse(
        f"{' and '.join(requests)}, and data.source = {job.data.source!r} holds no example out",
        rule="a run is evaluated on examples that are held out",
        fix=f"{fix}; or {' and '.join(f'{key} = 0' for key, value in keys.items() if value)}",
    )


def abstract_batch(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch, without tokenizing or packing the text."""
    size = job.train.global_batch
    if job.data.is_text:
        tokens = jax.ShapeDtypeStruct((size, job.data.seq), jnp.int32)
        if job.data.preferences:
            sides = [f"{side}_{name}" for side in ("chosen", "rejected") for name in ("inputs", "targets", "mask")]
            return dict.fromkeys(sides, tokens)
        names = ["inputs", "targets", *["mask"] * job.data.has_mask]
        names += ["segments", "positions"] * (job.data.documents == "apart")
        return dict.fromkeys(names, tokens)
    if job.data.source == "images":
        images = jax.ShapeDtypeStruct((size, *job.data.images.shape), jnp.float32)
        return {"inputs": images, "labels": jax.ShapeDtypeStruct((size,), jnp.int32)}
    try:
        batch = open_data(job).batch(0, size)
    except MemoryError as error:
        raise refuse(
            f"train.global_batch = {size}", rule="the memory of this machine holds a batch", fix="global_batch = 32"
        ) from error
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}


# The end-of-text tokens of a run: the document ends of its data, and the eos ids of the pretrained model.
#
# bytes, bpe             0
# a saved tokenizer      data.end, or its eos_token; for messages also the token that ends an answer in its template
# RUN/huggingface        eos_token_id of generation_config.json, or of config.json

ANSWER = "answer"


def data_ends(job: Job, folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a document or an answer in the data of a text run.

    Args:
      job: The job of the run.
      folder: The run folder, with the saved tokenizer.

    Raises:
      JaxparError: If the saved tokenizer cannot be read, or has no such token.
    """
    if job.data.tokenizer in OURS:
        return (END,)
    tokenizer = read_tokenizer(folder / "data" / TOKENIZER_FOLDER)
    has_answers = job.data.messages or (job.data.preferences and tokenizer.template)
    return tuple(dict.fromkeys((end_token(tokenizer, job.data.end), *(_answer_ends(tokenizer) if has_answers else ()))))


def end_tokens(job: Job, folder: Path, origin: Path) -> tuple[int, ...]:
    """Returns the end-of-text tokens of a run: those of its data, then those of the pretrained model.

    Args:
      job: The job of the run.
      folder: The run folder.
      origin: The run's copy of the pretrained model's small files; need not exist.
    """
    return tuple(dict.fromkeys((*data_ends(job, folder), *end_ids(origin))))


def _answer_ends(kept: TokenizerFacts) -> tuple[int, ...]:
    """Returns the first special token that the chat template writes after an answer, if any.

    It returns () also if the template rejects the chat, for example without a system message; then only `data.end` or
    eos ends an answer.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    subject = "a question and an answer"
    try:
        text, _ = load_template(kept).render_conversation(
            conversation(messages, None, column="messages", where=subject), subject
        )
    except JaxparError:
        return ()
    tokenizer = load(kept)
    ids = tokenizer.encode(text[text.rfind(ANSWER) + len(ANSWER) :], add_special_tokens=False).ids
    return tuple([token for token in ids if not tokenizer.decode([token])][:1])


def batch_factors(job: Job, sizes: Mapping[str, int], parallel: Parallel) -> dict[str, int]:
    """Returns the factors of the global batch by name: the axes that split it, and accumulated batches or microbatches.

    Args:
      job: The job.
      sizes: Sizes of the mesh axes by name.
      parallel: The declaration whose exchange decides whether `data` splits examples.
    """
    name, count = "accumulate", job.train.accumulate
    if sizes["pipe"] > 1:
        name = "microbatches"
        try:
            count = job.parallel.pipeline.table(sizes["pipe"]).microbatches * job.parallel.pipeline.group
        except JaxparError:  # `compose` reports it
            count = 1
    return {axis: sizes[axis] for axis in parallel.with_sizes(sizes).batch_axes} | {name: count}
