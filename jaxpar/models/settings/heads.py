"""Checks that heads divide a width, and finds the nearest numbers that do."""

from jaxpar.errors import nearest_divisor, refuse


def check_heads(dim: int, heads: int, *, kv_heads: int = 0, even: bool = False) -> None:
    """Checks that heads share a width.

    The way out of heads that do not divide it is the nearest number that does: that leaves the parameters as many, and
    every other matrix as it is. Where none is near, and where only a head's width is wrong, it is the nearest width.

    Args:
      dim: Width of the stream between blocks.
      heads: Attention heads, of dim / heads each.
      kv_heads: Heads of keys and values, which divide the heads; 0 is as many as heads.
      even: Whether the width of a head must be even, for rotary positions turn pairs.

    Raises:
      JaxparError: If they do not, with the number that would.
    """
    pair = 1 + even
    wide = f"dim = {max(1, (dim + pair * heads // 2) // (pair * heads)) * pair * heads}"
    if dim % heads:
        divides = lambda n: dim // n % pair == 0 and n % (kv_heads or 1) == 0  # noqa: E731
        near = nearest_divisor(dim, heads, good=divides)
        fix = f"heads = {near}" if near else wide
        raise refuse(f"dim = {dim}, heads = {heads}", rule="heads divide dim", fix=fix)
    if kv_heads and heads % kv_heads:
        raise refuse(
            f"heads = {heads}, kv_heads = {kv_heads}",
            rule="each head of keys and values serves a whole number of query heads",
            fix=f"kv_heads = {nearest_divisor(heads, kv_heads) or heads}",
        )
    if dim // heads % pair:
        raise refuse(
            f"head_dim = {dim // heads} with rotary positions",
            rule="rotary positions turn pairs, so head_dim is even",
            fix=f"{wide}, or position = 'learned'",
        )
