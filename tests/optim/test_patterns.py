"""A pattern that matches no parameter is refused with one that does."""

import pytest

from jaxpar.optim.patterns import matching, unmatched

LINEN = ["Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel", "Transformer/encoder_norm/scale"]
NNX = ["embed/table", "layers/0/attn/q_proj/kernel", "layers/0/attn/q_proj/bias", "layers/1/attn/q_proj/kernel"]


@pytest.mark.parametrize(
    ("pattern", "paths", "suggested", "count"),
    [
        ("*attention*", LINEN, "*Attention*", 1),
        ("transformer/encoderblock_0", LINEN, "Transformer/encoderblock_0", 1),
        ("query", LINEN, "*/query/*", 1),
        ("q_proj", NNX, "*/q_proj/*", 3),
        ("kernel", NNX, "*/kernel", 2),
        ("attn/q_proj/kernel", NNX, "*/attn/q_proj/kernel", 2),
        ("layers/.*/kernel", NNX, "layers/*/kernel", 2),
        ("layers.0.attn", NNX, "layers/0/attn", 2),
        (".*q_proj", NNX, "*/*q_proj/*", 3),
    ],
)
def test_a_pattern_of_another_tool_is_told_as_one_that_matches(pattern, paths, suggested, count):
    (problem,) = unmatched("paths", [pattern], paths)
    assert problem.fix == f"did you mean {suggested!r}?"
    assert len(matching(paths, [suggested])) == count


def test_a_misspelt_path_is_told_as_the_nearest():
    (problem,) = unmatched("paths", ["embd/*"], NNX)
    assert problem.fix == "did you mean 'embed'?"
