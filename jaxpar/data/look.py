"""What can be said about the text of a job before any of it is packed."""

from jaxpar.data.spec import OURS, Data
from jaxpar.data.text import check_length, text_files
from jaxpar.data.tokenizers.encode import corpus_of
from jaxpar.data.tokenizers.encoders import end_of
from jaxpar.data.tokenizers.saved import saved
from jaxpar.errors import refuse


def look(spec: Data) -> None:
    """Checks that there is text, that its first row is one, and that the tokenizer knows how a document ends.

    Raises:
      JaxparError: If not.
    """
    if spec.tokenizer not in OURS:
        end_of(saved(spec.tokenizer), spec.end)
    if spec.source == "stdlib":
        return
    files = text_files(spec)
    if spec.has_rows and next(corpus_of(spec, files[:1]).pieces(), None) is None:
        raise refuse(f"{files[0]} has no row", rule="a file of rows has at least one", fix="another data.path")
    if spec.source == "text" and spec.tokenizer == "bytes" and spec.documents == "mixed":
        check_length(sum(file.stat().st_size + 1 for file in files), spec)
