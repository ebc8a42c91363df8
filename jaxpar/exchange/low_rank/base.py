"""What codes of matrices have in common: which parameters, what is remembered, and where it is computed."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Problem, check_ranges
from jaxpar.exchange.base import Tree, by_path
from jaxpar.exchange.compressed.chosen import CAUSE, Chosen
from jaxpar.exchange.part import Part
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION

if TYPE_CHECKING:
    import jax

    from jaxpar.exchange.between import Between
    from jaxpar.exchange.low_rank.matrices import Matrix


@dataclass(frozen=True, kw_only=True)
class LowRank(Chosen):
    """Gradients that travel as products of two thin matrices.

    Attributes:
      rank: Columns of one, and rows of the other.
      smallest: Parameters of fewer elements are not compressed.
      whole: Patterns of paths that are not compressed either: norms and biases.
      feedback: Whether what is lost is added to the next step's gradient.
    """

    rank: int = 4
    of_shapes = True

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, SECTION, {"rank": (1, 2**16)})

    @abstractmethod
    def agreed(
        self, given: "Mapping[str, jax.Array]", last: "Mapping[str, jax.Array]"
    ) -> "tuple[dict[str, jax.Array], dict[str, jax.Array]]":
        """Returns the mean over replicas as it travelled, and what of its own this replica could not send.

        Called inside of `shard_map`. All arrays are [layers, rows, columns] in float32.

        Args:
          given: This replica's matrices by path.
          last: What the mean was in the step before, at first zeros; empty where it is not kept.
        """

    @abstractmethod
    def travels(self, matrix: "Matrix", replicas: int) -> dict[str, int]:
        """Returns which collectives send how many float32 of a gradient: kind to payload in elements."""

    warm = False  # whether the last mean is kept

    def worth(self, matrix: "Matrix", replicas: int) -> bool:
        """Returns whether a gradient is compressed, as far as its shape says."""
        return True

    def idle(self, parts: Mapping[str, Part], replicas: int) -> list[Problem]:
        """Returns whether no parameter is compressed."""
        if self._matrices(parts, replicas):
            return []
        return super().idle(parts, replicas) or [
            Problem(
                f"exchange {self} compresses nothing between {replicas} replicas",
                "products of rank columns and rows are sent where they are smaller than the matrices of a model",
                f"rank = {max(self.rank // 4, 1)}, or leave the exchange out",
            )
        ]

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns what is remembered: of each replica what it could not send, and the last mean."""
        import jax.numpy as jnp

        flat = {path: x for path, x in by_path(params)[0].items() if self.compresses(path, x.size) and x.ndim > 1}
        own = {}
        if self.feedback:
            own["lost"] = {path: jnp.zeros((replicas, *x.shape), jnp.float32) for path, x in flat.items()}
        if self.warm:
            own["last"] = {path: jnp.zeros(x.shape, jnp.float32) for path, x in flat.items()}
        return own

    def gradients(self, local: Tree, own: Tree, between: "Between") -> tuple[Tree, Tree]:
        """Returns the mean gradient as its products say, and what that lost."""
        import jax
        from jax.sharding import PartitionSpec

        from jaxpar.exchange.between import AXIS
        from jaxpar.exchange.low_rank.matrices import flattened

        flat, structure = by_path(local)
        specs = dict(zip(flat, structure.flatten_up_to(between.specs), strict=True))
        shapes = self._matrices(between.parts, between.replicas)
        whole = {path: specs[path] for path in shapes}
        apart = {path: PartitionSpec(AXIS, *spec) for path, spec in whole.items()}
        lost = {path: own["lost"][path] for path in shapes} if self.feedback else {}
        last = {path: own["last"][path] for path in shapes} if self.warm else {}

        def inside(local, lost, last):
            given = {path: x + lost[path] if lost else x for path, x in local.items()}
            mean, missed = self.agreed(flattened(given, shapes), flattened(last, shapes))
            found = {path: x.reshape(local[path].shape[1:]) for path, x in mean.items()}
            return found, {path: missed[path].reshape(lost[path].shape) for path in lost}

        found = {}
        if shapes:
            run = jax.shard_map(
                inside, mesh=between.mesh, check_vma=False,
                in_specs=(apart, apart if lost else {}, whole if last else {}),
                out_specs=(whole, apart if lost else {}),
            )  # fmt: skip
            found, lost = run({path: flat[path] for path in shapes}, lost, last)
        rest = {path: x for path, x in flat.items() if path not in shapes}
        mean = found | between.of({path: specs[path] for path in rest}).mean(rest)
        after = {"lost": own["lost"] | lost} if self.feedback else {}
        if self.warm:
            after["last"] = own["last"] | found
        return structure.unflatten([mean[path].astype(flat[path].dtype) for path in flat]), after

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns the collectives of the products, and an all-reduce of what is not compressed."""
        from jaxpar.exchange.between import AXIS, averaged
        from jaxpar.mesh.collective import Collective

        shapes = self._matrices(shards, replicas)
        sizes: dict[str, int] = {}
        for each in shapes.values():
            for name, elements in self.travels(each, replicas).items():
                sizes[name] = sizes.get(name, 0) + each.layers * elements
        found = [
            Collective(
                kind=name.partition(" ")[0], axes=(AXIS,), dtype="f32", group=replicas, times=1, payload=4 * size,
                cause=CAUSE, parameters=tuple(shapes),
            )
            for name, size in sizes.items()
        ]  # fmt: skip
        rest = {path: part for path, part in shards.items() if path not in shapes}
        return (*(Sent(collective=each) for each in found), *averaged(rest, replicas))

    def _matrices(self, parts: Mapping[str, Part], replicas: int) -> "dict[str, Matrix]":
        """Returns the parameters that are compressed, as what a device holds of each."""
        from jaxpar.exchange.low_rank.matrices import matrix

        found = {path: matrix(part) for path, part in parts.items() if self.compresses(path, part.whole)}
        return {path: each for path, each in found.items() if each is not None and self.worth(each, replicas)}
