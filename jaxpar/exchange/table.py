"""The exchanges that a job may name in `[parallel.exchange]`."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.errors import refuse
from jaxpar.exchange.averaging.gossip import Gossip
from jaxpar.exchange.averaging.local import DiLoCo, Easgd, Ensemble, Local
from jaxpar.exchange.averaging.streaming import Streaming
from jaxpar.exchange.base import EXCHANGES, AllReduce, Exchange
from jaxpar.exchange.compressed.quantization import BFloat16, Qsgd, Sign, Ternary
from jaxpar.exchange.compressed.sparsification import RandomK, Sparse, TopK
from jaxpar.exchange.low_rank_gradients import Factors, PowerSgd
from jaxpar.tables import replace_rows

_DIFFER = Local, DiLoCo, Streaming, Easgd, Gossip, Ensemble
_COMPRESSED = BFloat16, Qsgd, Ternary, Sign, TopK, RandomK, Sparse, PowerSgd, Factors
for _kind in (AllReduce, *_DIFFER, *_COMPRESSED):
    EXCHANGES[_kind.__dataclass_fields__["name"].default] = _kind


@contextmanager
def with_exchange(name: str, exchange: type[Exchange]) -> Iterator[None]:
    """Adds an exchange until the context ends.

    Raises:
      JaxparError: If the name is taken.
    """
    if name in EXCHANGES:
        raise refuse(
            f"an exchange {name!r}",
            rule=f"a new exchange has a new name; there are {', '.join(EXCHANGES)}",
            fix="another name",
        )
    with replace_rows(EXCHANGES, {**EXCHANGES, name: exchange}):
        yield
