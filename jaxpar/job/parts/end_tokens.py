"""The tokens that end a text of a run: those that its data ended documents with, and those of the model's folder.

bytes, bpe             0
a saved tokenizer      data.end, or its eos_token; of messages also the token by which its template ends an answer
RUN/huggingface        eos_token_id of generation_config.json, or of config.json
"""

from pathlib import Path

from jaxpar.data.documents.messages import conversation
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.chat import chat
from jaxpar.data.tokenizers.encoders import END, end_of, load
from jaxpar.data.tokenizers.saved import Saved, saved
from jaxpar.data.tokens import KEPT
from jaxpar.errors import JaxparError
from jaxpar.job.file.schema import Job
from jaxpar.models.huggingface.folder import end_ids

ANSWER = "answer"


def data_ends(job: Job, folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a document or an answer in the data of a run of text.

    Args:
      job: The job of the run.
      folder: The run folder, which keeps its tokenizer.

    Raises:
      JaxparError: If the tokenizer that it keeps cannot be read, or has no such token.
    """
    if job.data.tokenizer in OURS:
        return (END,)
    kept = saved(folder / "data" / KEPT)
    return tuple(dict.fromkeys((end_of(kept, job.data.end), *(_answer_ends(kept) if job.data.messages else ()))))


def end_tokens(job: Job, folder: Path, origin: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text of a run: those of its data and those of the model that it began with.

    Args:
      job: The job of the run.
      folder: The run folder.
      origin: The folder of Hugging Face's that the run keeps, there or not.
    """
    return tuple(dict.fromkeys((*data_ends(job, folder), *end_ids(origin))))


def _answer_ends(kept: Saved) -> tuple[int, ...]:
    """Returns the first special token after an answer; none where the template writes none, or refuses so short a chat.

    In the second case, such as that of a template that asks for a system's message, `data.end` or eos is the end alone.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    where = "a question and an answer"
    try:
        text, _ = chat(kept).text(conversation(messages, None, column="messages", where=where), where)
    except JaxparError:
        return ()
    tokenizer = load(kept)
    ids = tokenizer.encode(text[text.rfind(ANSWER) + len(ANSWER) :], add_special_tokens=False).ids
    return tuple([each for each in ids if not tokenizer.decode([each])][:1])
