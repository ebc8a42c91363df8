"""What compressed gradients have in common: which are compressed, what is remembered, and how they travel.

    gradient + error ─► rows, one for each replica ─► encode ─► all-to-all ─► decode, mean (+ error) ─► encode
                                                                all replicas ◄─ decode ◄─ all-gather ◄─┘

What a code loses is added to the next step's gradient (error feedback: Seide et al. 2014; Karimireddy et al. 2019,
arXiv:1901.09847), by who made the code: each replica for its own gradients, and for its piece of the mean. What is
remembered is of gradients: the papers remember updates, the rate in them, which is the same while the rate is. The
optimizer's chain, clipping by a norm included, has the decoded mean, after the code.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.base import Tree, by_path
from jaxpar.exchange.compressed.chosen import CAUSE, Chosen
from jaxpar.exchange.part import Part, filled, piece_dim
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION, STEPS

if TYPE_CHECKING:
    import jax
    import numpy as np

    from jaxpar.exchange.between import Between


class Bytes(NamedTuple):
    """An array of a code: its elements for so many of the gradient's, and its dtype in HLO's words."""

    elements: int
    dtype: str
    size: int  # bytes of an element


@dataclass(frozen=True, kw_only=True)
class Compressed(Chosen):
    """Gradients that travel as a code.

    Attributes:
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      feedback: Whether what a code loses is added to the next step's gradient.
      block: Elements that have a scale in common.
    """

    block: int = 1024
    common = False  # whether replicas draw the same random numbers

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
        """Returns the code of rows of elements, each array of it with their dim 0. rows: [rows, blocks * block]."""

    def without_filling(self, code: dict[str, "jax.Array"], counts: "np.ndarray") -> dict[str, "jax.Array"]:
        """Returns the code of rows whose blocks have so many elements, and zeros after them. counts: [blocks]."""
        return code

    @abstractmethod
    def decode(self, code: dict[str, "jax.Array"]) -> "jax.Array":
        """Returns the elements that a code stands for. Shape [rows, blocks * block], float32."""

    @abstractmethod
    def coded(self, elements: int) -> tuple[Bytes, ...]:
        """Returns what the code of a row of so many elements is made of."""

    def encode_mean(
        self, rows: "jax.Array", key: "jax.Array", replicas: int, came: "dict[str, jax.Array] | None" = None
    ) -> dict[str, "jax.Array"]:
        """Returns the code of the mean over replicas, for which they have another where it has more elements.

        Args:
          rows: The mean. Shape [1, blocks * block].
          key: Of what is drawn.
          replicas: How many.
          came: The codes that it is the mean of, [replicas, ...] each.
        """
        return self.encode(rows, key)

    def coded_mean(self, elements: int, replicas: int) -> tuple[Bytes, ...]:
        """Returns what the code of the mean of a row is made of."""
        return self.coded(elements)

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the count of steps, and where errors are remembered those of gradients and of pieces of the mean."""
        import jax.numpy as jnp

        own = {"step": jnp.zeros((), jnp.int32)}
        if not self.feedback:
            return own
        flat = {path: x for path, x in by_path(params)[0].items() if self.compresses(path, x.size)}
        return own | {
            "lost": {path: jnp.zeros((replicas, *x.shape), jnp.float32) for path, x in flat.items()},
            "pieces": {path: jnp.zeros(x.shape, jnp.float32) for path, x in flat.items()},
        }

    def gradients(self, local: Tree, own: Tree, between: "Between") -> tuple[Tree, Tree]:
        """Returns the mean gradient as its code says, and what that lost."""
        from jaxpar.exchange.compressed.two_phases import exchanged

        flat, structure = by_path(local)
        specs = dict(zip(flat, structure.flatten_up_to(between.specs), strict=True))
        dims = self._dims(between.parts, between.replicas)
        found, lost, pieces = exchanged(
            self,
            {path: flat[path] for path in dims},
            {path: own["lost"][path] for path in dims} if self.feedback else {},
            {path: own["pieces"][path] for path in dims} if self.feedback else {},
            dims,
            between.of({path: specs[path] for path in dims}),
            own["step"],
        )
        rest = {path: x for path, x in flat.items() if path not in dims}
        mean = found | between.of({path: specs[path] for path in rest}).mean(rest)
        after = {"step": own["step"] + 1}
        if self.feedback:
            after |= {"lost": own["lost"] | lost, "pieces": own["pieces"] | pieces}
        return structure.unflatten([mean[path].astype(flat[path].dtype) for path in flat]), after

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns the two collectives of each array of a code, and an all-reduce of what is not compressed."""
        from jaxpar.exchange.between import AXIS, averaged
        from jaxpar.mesh.collective import Collective

        dims = self._dims(shards, replicas)
        row = sum(
            filled(shards[path].size // replicas, self.block) for path in dims
        )  # a piece of each, in whole blocks
        codes = {"all-to-all": self.coded(row), "all-gather": self.coded_mean(row, replicas)} if row else {}
        found = [
            Collective(
                kind=kind, axes=(AXIS,), dtype=code.dtype, group=replicas, times=1,
                payload=replicas * code.elements * code.size, cause=CAUSE, parameters=tuple(dims),
            )
            for kind, arrays in codes.items()
            for code in arrays
        ]  # fmt: skip
        rest = {path: part for path, part in shards.items() if path not in dims}
        return (*(Sent(collective=each) for each in found), *averaged(rest, replicas))

    def _dims(self, parts: Mapping[str, Part], replicas: int) -> dict[str, int]:
        """Returns the parameters that are compressed, with the dim in which replicas have pieces of each."""
        found = {path: piece_dim(part.shape, replicas) for path, part in parts.items()
                 if self.compresses(path, part.whole)}  # fmt: skip
        return {path: dim for path, dim in found.items() if dim is not None}
