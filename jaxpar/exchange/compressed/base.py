"""The base class of compressed gradients: blocks, error feedback, and the traffic.

    gradient + error ─► rows, one per replica ─► encode ─► all-to-all ─► decode, mean (+ error) ─► encode
                                                                all replicas ◄─ decode ◄─ all-gather ◄─┘

A replica adds the error of a code to the input of the next step's encoding (error feedback: Seide et al. 2014;
Karimireddy et al. 2019, arXiv:1901.09847), both for its own gradients and for its piece of the mean. Errors are stored
in units of gradients; the papers store errors of updates, which include the learning rate, so both agree while the rate
is constant. The optimizer's chain, including clipping by a norm, gets the decoded mean.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.errors import Problem, check_ranges, refuse
from jaxpar.exchange.base import SECTION, STEPS, Exchange, Tree, flatten_by_path
from jaxpar.mesh.collective import ShardShape, Traffic, piece_dim, round_up

if TYPE_CHECKING:
    import jax
    import numpy as np

    from jaxpar.exchange.replica_mesh import ReplicaMesh


CAUSE = "gradients"  # cause of the traffic of compressed gradients


@dataclass(frozen=True, kw_only=True)
class SelectiveExchange(Exchange):
    """An exchange that compresses the gradients of some parameters and sums the others uncompressed.

    Attributes:
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      feedback: Whether the compression error is added to the next step's gradient.
    """

    smallest: int = 4096
    whole: tuple[str, ...] = ("*bias*", "*scale*", "*norm*")
    feedback: bool = True

    def __post_init__(self):
        check_ranges(self, SECTION, {"smallest": (1, STEPS)})

    def compresses(self, path: str, size: int, dtype: object) -> bool:
        """Returns whether a parameter's gradient is compressed; complex ones are not, because codes hold real numbers.

        Args:
          path: Path of the parameter.
          size: Number of its elements, on all devices together.
          dtype: Dtype of the parameter.
        """
        named = any(fnmatchcase(path.lower(), pattern) for pattern in self.whole)
        return size >= self.smallest and not named and not _is_complex(dtype)

    def idle(self, parts: Mapping[str, ShardShape], replicas: int) -> list[Problem]:
        """Returns a problem if no parameter of a model is compressed."""
        if any(self.compresses(path, part.total_size, part.dtype) for path, part in parts.items()):
            return []
        largest = max((part.total_size for part in parts.values() if not _is_complex(part.dtype)), default=0)
        reason = f"the largest parameter has {largest:,} elements" if largest else "all parameters are complex"
        return [
            Problem(
                f"exchange {self} compresses nothing: {reason}",
                f"parameters of {self.smallest:,} elements and more are compressed, except complex ones and paths that "
                "match `whole`",
                f"smallest = {max(largest // 2, 1)}, or leave the exchange out" * bool(largest)
                or "leave the exchange out",
            )
        ]

    def explain(self, sent: Iterable[Traffic]) -> str:
        """Describes in a sentence how replicas synchronize, the traffic, and which parameters are compressed."""
        sent = tuple(sent)
        coded = {path for item in sent if item.collective.cause == CAUSE for path in item.collective.parameters}
        plain = {path for item in sent if item.collective.cause != CAUSE for path in item.collective.parameters}
        uncompressed = f"; whole: {', '.join(sorted(plain))}" if plain else ""
        return f"{super().explain(sent)}; compressed: {', '.join(sorted(coded)) or 'nothing'}{uncompressed}"


def _is_complex(dtype: Any) -> bool:
    import numpy as np

    return np.dtype(dtype).kind == "c"


class CodeArray(NamedTuple):
    """An array of a code: its number of elements, its dtype in HLO's notation, and its size."""

    elements: int
    dtype: str
    size: int  # bytes of an element


@dataclass(frozen=True, kw_only=True)
class Compressed(SelectiveExchange):
    """Gradients sent as a code.

    Attributes:
      smallest: Parameters with fewer elements than this are not compressed.
      whole: Patterns of the paths of further uncompressed parameters, by default norms and biases.
      feedback: Whether the error of a code is added to the next step's gradient.
      block: Number of elements that share a scale.
    """

    block: int = 1024
    shared_key = False  # whether replicas draw the same random numbers

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, SECTION, {"block": (8, STEPS)})
        if self.block % 8:
            raise refuse(
                f"{SECTION}.block = {self.block}",
                rule="elements of a block fill bytes: 8 divides it",
                fix=f"block = {-(-self.block // 8) * 8}",
            )

    @abstractmethod
    def encode(self, rows: "jax.Array", key: "jax.Array") -> dict[str, "jax.Array"]:
        """Encodes elements [rows, blocks * block] as arrays with the same dim 0."""

    def without_padding(self, code: dict[str, "jax.Array"], counts: "np.ndarray") -> dict[str, "jax.Array"]:
        """Removes the effect of padding from a code. counts: elements of each block that are no padding, [blocks]."""
        return code

    @abstractmethod
    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Decodes a code to elements. Shape [rows, blocks * block], float32."""

    @abstractmethod
    def code_arrays(self, elements: int) -> tuple[CodeArray, ...]:
        """Returns the arrays in the code of a row, from its number of elements."""

    def encode_mean(
        self, rows: "jax.Array", key: "jax.Array", replicas: int, codes: "dict[str, jax.Array] | None" = None
    ) -> dict[str, "jax.Array"]:
        """Encodes the mean over replicas; a subclass overrides it if the mean has more elements than a replica's code.

        Args:
          rows: The mean. Shape [1, blocks * block].
          key: PRNG key of the encoding.
          replicas: Number of replicas.
          codes: The arrays of the replicas' codes, whose decoded mean is `rows`. [replicas, ...] each.
        """
        return self.encode(rows, key)

    def mean_code_arrays(self, elements: int, replicas: int) -> tuple[CodeArray, ...]:
        """Returns the arrays in the code of a row of the mean."""
        return self.code_arrays(elements)

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns a step count of 0 and, with feedback, zero errors of the gradients and of the pieces of the mean."""
        import jax.numpy as jnp

        state = {"step": jnp.zeros((), jnp.int32)}
        if not self.feedback:
            return state
        flat = {path: x for path, x in flatten_by_path(params)[0].items() if self.compresses(path, x.size, x.dtype)}
        return state | {
            "lost": {path: jnp.zeros((replicas, *x.shape), jnp.float32) for path, x in flat.items()},
            "pieces": {path: jnp.zeros(x.shape, jnp.float32) for path, x in flat.items()},
        }

    def gradients(self, local: Tree, own: Tree, between: "ReplicaMesh") -> tuple[Tree, Tree]:
        """Returns the decoded mean gradient, and the new state with the codes' errors."""
        from jaxpar.exchange.compressed.two_phases import exchange_codes

        flat, structure = flatten_by_path(local)
        specs = dict(zip(flat, structure.flatten_up_to(between.specs), strict=True))
        dims = _piece_dims(self, between.parts, between.replicas)
        decoded, errors, pieces = exchange_codes(
            self,
            {path: flat[path] for path in dims},
            {path: own["lost"][path] for path in dims} if self.feedback else {},
            {path: own["pieces"][path] for path in dims} if self.feedback else {},
            dims,
            between.with_specs({path: specs[path] for path in dims}),
            own["step"],
        )
        uncompressed = {path: x for path, x in flat.items() if path not in dims}
        mean = decoded | between.with_specs({path: specs[path] for path in uncompressed}).mean(uncompressed)
        state = {"step": own["step"] + 1}
        if self.feedback:
            state |= {"lost": own["lost"] | errors, "pieces": own["pieces"] | pieces}
        return structure.unflatten([mean[path].astype(flat[path].dtype) for path in flat]), state

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns two collectives per array of the code, and an all-reduce per uncompressed gradient."""
        from jaxpar.exchange.replica_mesh import AXIS, mean_traffic
        from jaxpar.mesh.collective import Collective

        dims = _piece_dims(self, shards, replicas)
        row = sum(
            round_up(shards[path].size // replicas, self.block) for path in dims
        )  # a piece of each parameter, in whole blocks
        codes = {"all-to-all": self.code_arrays(row), "all-gather": self.mean_code_arrays(row, replicas)} if row else {}
        collectives = [
            Collective(
                kind=kind, axes=(AXIS,), dtype=code.dtype, group=replicas, times=1,
                payload=replicas * code.elements * code.size, cause=CAUSE, parameters=tuple(dims),
            )
            for kind, arrays in codes.items()
            for code in arrays
        ]  # fmt: skip
        uncompressed = {path: part for path, part in shards.items() if path not in dims}
        return (*(Traffic(collective=collective) for collective in collectives), *mean_traffic(uncompressed, replicas))


def _piece_dims(code: Compressed, parts: Mapping[str, ShardShape], replicas: int) -> dict[str, int]:
    """Maps each compressed parameter to the dim along which it is divided into the replicas' pieces."""
    dims = {path: piece_dim(part.shape, replicas) for path, part in parts.items()
            if code.compresses(path, part.total_size, part.dtype)}  # fmt: skip
    return {path: dim for path, dim in dims.items() if dim is not None}


def pack_bits(values: "jax.Array", bits: int) -> "jax.Array":
    """Packs integers below 2^bits into bytes. Shape [..., n] to [..., n * bits / 8], uint8.

    Args:
      values: Integers; n * bits is a multiple of 8.
      bits: Bits per integer: 1, 2, 4 or 8.
    """
    import jax.numpy as jnp

    per_byte = 8 // bits
    values = values.astype(jnp.uint8).reshape(*values.shape[:-1], -1, per_byte)
    shifts = jnp.arange(per_byte, dtype=jnp.uint8) * jnp.uint8(bits)
    return jnp.sum(values << shifts, axis=-1, dtype=jnp.uint8)


def unpack_bits(data: "jax.Array", bits: int) -> "jax.Array":
    """Unpacks integers from bytes. Shape [..., n] to [..., n * 8 / bits], uint8."""
    import jax.numpy as jnp

    per_byte = 8 // bits
    shifts = jnp.arange(per_byte, dtype=jnp.uint8) * jnp.uint8(bits)
    values = (data[..., None] >> shifts) & jnp.uint8((1 << bits) - 1)
    return values.reshape(*data.shape[:-1], -1)
