"""Real input: every batch is a pure function of the step, so that a run resumes from a number.

Nouns: a `Source` of batches, the `Data` of a job, an order of examples, packed tokens with their hashes, held-out
examples counted once. To add a source: a class that implements `spec.Source`, and a row of `sources.py`.
"""
