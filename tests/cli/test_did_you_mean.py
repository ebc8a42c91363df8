"""A misspelt name is answered with the nearest one, whatever its case."""

import pytest

from jaxpar.errors import suggest


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("adamW", ["adam", "adamw", "sgd"], "adamw"),
        ("ADAMW", ["adam", "adamw", "sgd"], "adamw"),
        ("SGD", ["adam", "adamw", "sgd"], "sgd"),
        ("decoder", ["MLP", "Decoder"], "Decoder"),
        ("Global_Batch", ["global_batch", "growth"], "global_batch"),
        ("lerning_rate", ["learning_rate"], "learning_rate"),
    ],
)
def test_case_does_not_count(word, known, meant):
    assert suggest(word, known) == f"did you mean {meant!r}?"


def test_what_is_near_to_nothing_lists_the_names():
    assert suggest("zzz", ["adam", "SGD"]) == "one of: SGD, adam"
