"""The end-of-text tokens of a run: the document ends of its data, and the eos ids of the pretrained model.

bytes, bpe             0
a saved tokenizer      data.end, or its eos_token; for messages also the token that ends an answer in its template
RUN/huggingface        eos_token_id of generation_config.json, or of config.json
"""

from pathlib import Path

from jaxpar.data.documents.messages import conversation
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.chat import load_template
from jaxpar.data.tokenizers.encoders import END, end_token, load
from jaxpar.data.tokenizers.tokenizer_facts import TokenizerFacts, read_tokenizer
from jaxpar.data.tokens import KEPT
from jaxpar.errors import JaxparError
from jaxpar.job.file.schema import Job
from jaxpar.models.huggingface.folder import end_ids

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
    tokenizer = read_tokenizer(folder / "data" / KEPT)
    return tuple(
        dict.fromkeys((end_token(tokenizer, job.data.end), *(_answer_ends(tokenizer) if job.data.messages else ())))
    )


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

    Also () if the template rejects a chat without, say, a system message: then only `data.end` or eos ends an answer.
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
