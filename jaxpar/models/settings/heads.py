"""Checks that heads divide a width, and suggests the nearest numbers that do."""

from jaxpar.errors import nearest_divisor, refuse


def check_heads(dim: int, heads: int, *, kv_heads: int = 0, even: bool = False) -> None:
    """Checks that heads divide a width.

    The suggested fix is the nearest number of heads that divides it: that leaves the number of parameters, and every
    other matrix, as they are. If no such number is near, or only a head's width is wrong, it is the nearest width.

    Args:
      dim: Width of the stream between blocks.
      heads: Number of attention heads, each dim / heads wide.
      kv_heads: Number of heads of keys and values, which divides heads; 0 means as many as heads.
      even: Whether the width of a head must be even, because rotary positions rotate pairs.

    Raises:
      JaxparError: If they do not, with a number that does.
    """
    pair = 1 + even
    width_fix = f"dim = {max(1, (dim + pair * heads // 2) // (pair * heads)) * pair * heads}"
    if dim % heads:
        divides = lambda n: dim // n % pair == 0 and n % (kv_heads or 1) == 0  # noqa: E731
        candidate = nearest_divisor(dim, heads, good=divides)
        fix = f"heads = {candidate}" if candidate else width_fix
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
            fix=f"{width_fix}, or position = 'learned'",
        )
