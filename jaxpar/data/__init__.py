"""Input data: a batch is a pure function of the step, so that a run resumes anywhere from a number.

    documents ─► tokenizers ─► packing: tokens on the disk, hashed ─► text.Tokens, rows ─┐
    .npz, .npy, digits ─────────────────────────────────────────────────► arrays.Arrays ─┼─► batch(step, size, rows)
    Python ─────────────────────────────────────────────────────► streams, iterables.Own ┘     ─► (train.feed) ─► step

Nouns: `Data` (the `[data]` table of a job), a `Source` of batches, `Examples` (told apart by a number, in the order of
a seed and an epoch, some held out), a `Piece` of a document and the `Place` after it, an `Encoder` of pieces to tokens,
packed tokens and the list of their hashes, `BatchSpec` (what a good batch is), and `Weighted` batches, which count each
held-out example once.

Rooms: `documents` (files, JSONL, Parquet), `tokenizers` (Hugging Face's, templates, marks of tokens), `rows` (documents
alone or apart, mixtures), `streams` (data of one's own).

To add a source: a class that implements `spec.Source` (`examples.Examples` does most of it where examples have numbers)
and its line in `sources.open_data`. It is asked for the rows of one process, and reads no others.
"""
