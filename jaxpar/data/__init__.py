"""Input data: a batch is a pure function of the step, so that a run resumes anywhere from a number.

    text ─► packing: tokens on the disk, hashed ─► text.Tokens ─┐
    .npz, .npy, digits ────────────────────────► arrays.Arrays ─┼─► batch(step, size, rows) ─► (train.feed) ─► the step
    Python ───────────────────► iterables.Stream, iterables.Own ┘

Nouns: `Data` (the `[data]` table of a job), a `Source` of batches, `Examples` (told apart by a number, in the order of
a seed and an epoch, some held out), packed tokens and the list of their hashes, `BatchSpec` (what a good batch is), and
`Weighted` batches, which count each held-out example once.

To add a source: a class that implements `spec.Source` (`examples.Examples` does most of it where examples have numbers)
and its line in `sources.open_data`. It is asked for the rows of one process, and reads no others.
"""
