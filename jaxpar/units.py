"""Parses and prints bytes, counts, FLOP and seconds for all of jaxpar. GiB = 2^30, GB = 10^9."""

import math
import re
from numbers import Real

from jaxpar.errors import JaxparError, refuse

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB")


def show_bytes(count: float) -> str:
    """Formats a size in binary units.

    >>> show_bytes(1536)
    '1.5 KiB'
    """
    power = 0
    while abs(count) >= 1024 and power < len(_BINARY) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.4g} {_BINARY[power]}"


def parse_bytes(text: str | float) -> int:
    """Parses a size such as `64 MiB`, `2GB` or `512 B`; a number is returned as it is.

    Raises:
      JaxparError: If it is no size. A text needs a unit, unless it is 0: nobody means three bytes by `3`.

    >>> parse_bytes("1.5 KiB"), parse_bytes(512), parse_bytes("0")
    (1536, 512, 0)
    """
    if isinstance(text, Real) and 0 <= float(text) < math.inf:
        return int(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    scale = {unit: 1024**i for i, unit in enumerate(_BINARY)} | {unit: 1000**i for i, unit in enumerate(_DECIMAL)}
    if match and not match[2]:
        if float(match[1]) == 0:
            return 0
        fix = f'write it as "{match[1]} GiB" or "{match[1]} B"'
        raise refuse(f"{text!r} has no unit", rule=f"a number and one of {', '.join(scale)}", fix=fix)
    if not match or match[2] not in scale:
        raise refuse(f"{text!r} is no size", rule=f"a number and one of {', '.join(scale)}", fix='write it as "64 MiB"')
    return int(float(match[1]) * scale[match[2]])


def parse_rate(text: str | float) -> float:
    """Parses a bandwidth such as `12GB/s`, `12GB` or, in bits, `10Gb/s`; returns bytes per second.

    A number is one of bytes per second.

    Raises:
      JaxparError: If the text is no bandwidth.

    >>> parse_rate("10Gb/s")
    1250000000.0
    """
    text = (
        f"{int(text)}B"
        if isinstance(text, Real) and not isinstance(text, bool) and 0 <= float(text) < math.inf
        else str(text)
    )
    bits = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(?:b|bit)(?:/s|ps)\s*", text)
    if bits:
        return float(bits[1]) * 1000.0 ** " kMGT".index(bits[2] or " ") / 8
    try:
        return float(parse_bytes(text.strip().removesuffix("/s")))
    except JaxparError as error:
        rule = "bytes per second, B, or bits per second, b, with k, M, G or T before it"
        bare = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:/s)?\s*", text)
        if bare:
            raise refuse(f"{text!r} has no unit", rule=rule, fix=f"{bare[1]}GB/s, or {bare[1]}Gb/s") from error
        raise refuse(f"{text!r} is no bandwidth", rule=rule, fix="12GB/s, or 10Gb/s") from error


def show_count(count: float) -> str:
    """Formats a count with a decimal prefix.

    >>> show_count(1_234_567), show_count(999_700)
    ('1.23 M', '1 M')
    """
    for prefix in ("", " k", " M", " G", " T"):
        if abs(count) < 999.5:  # above, three digits would print 1e+03
            return f"{count:.3g}{prefix}"
        count /= 1000
    return f"{count:.3g} P"


def show_seconds(seconds: float) -> str:
    """Formats a duration.

    >>> show_seconds(3725), show_seconds(0.9997)
    ('1:02:05', '1 s')
    """
    if seconds < 0.9995:  # above, three digits would print 1e+03 ms
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
