"""Input data: a batch is a pure function of the step, so a run resumes at any step from the step number alone.

    documents ─► tokenizers ─► packing: tokens on disk, hashed ──────► text.Tokens, rows ─┐
    pictures in folders, .tar, Parquet ─────────────────────────► images.source.Images ─┤
    .npz, .npy, digits ─────────────────────────────────────────────────► arrays.Arrays ─┼─► batch(step, size, rows)
    Python ─────────────────────────────────────────────────────► streams, iterables.Own ┘     ─► (train.feed) ─► step

Terms: `Data` (the `[data]` table of a job), a `Source` of batches, `Examples` (indexed, shuffled by seed and epoch, a
share held out), a `DocumentPiece` and the `Place` after it, an `Encoder` from pieces to tokens, packed tokens
with a hash manifest, `BatchSpec` (the checks of a batch), and `WeightedBatch` batches, which count a held-out example
once.

Rooms: `documents` (files, JSONL, Parquet), `tokenizers` (Hugging Face's, chat templates),
`images` (pictures and their classes), `document_rows` (one or several documents per row, mixtures), `streams` (the
user's own data).

To add a source: a class that implements `spec.Source` (`examples.Examples` does most of it for indexed examples) and a
line in `sources.open_data`. Each process requests only its own rows, and the source reads no others.
"""
