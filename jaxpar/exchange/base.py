"""The protocol of an exchange, which synchronizes replicas of a model that train on different examples.

    every step                 gradients of each replica ─► gradients(...) ─► its update
    also every N steps                                                            └─► synchronize(...) ─► next step

Trees of replicas have a leading dim `replica`, sharded over the mesh axis `data`: each replica holds its own entry, and
only sums over that dim communicate. These trees omit parameters that the optimizer freezes.

The default, `AllReduce`, sums gradients over the replicas in every step, so the replicas stay equal. XLA inserts the
collective, as for any axis that splits examples: see `jaxpar.step.unpipelined`.
"""

from abc import ABCMeta
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Keywords, Problem, refuse, suggest
from jaxpar.exchange.collectives import algorithms
from jaxpar.mesh.collective import ShardShape, Traffic
from jaxpar.units import show_bytes

if TYPE_CHECKING:
    from jaxpar.exchange.replica_mesh import ReplicaMesh


Tree = Any  # a nested dict of arrays, or of abstract arrays


def flatten_by_path(tree: Tree) -> tuple[dict[str, Any], Any]:
    """Returns the arrays of a tree by path, and the tree's structure."""
    import jax

    from jaxpar.sharding.names import format_path

    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {format_path(keys): leaf for keys, leaf in leaves}, structure


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The state of all replicas at a sync round.

    Attributes:
      params: Parameters; [replica, ...] if replicas differ.
      opt_state: Optimizer states, likewise.
      exchange_state: The state of the exchange, of the structure that `Exchange.init` returns.
      model_state: Other state of the model, such as averages of BatchNorm. [replica, ...].
    """

    params: Tree
    opt_state: Tree
    exchange_state: Tree
    model_state: Tree = ()


MEAN, NO_MODEL = "mean", "none"  # values of `Exchange.global_model` that are not keys of the exchange's state
EXCHANGES: dict[str, type["Exchange"]] = {}  # by name in a job; `table` fills it


class _ExchangeMeta(ABCMeta):
    """The metaclass of exchanges: it makes `Exchange("diloco", every=20)` construct a `DiLoCo`."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        if cls is not Exchange:
            return super().__call__(*args, **settings)
        name = args[0] if args else settings.pop("name", "")
        if not isinstance(name, str) or name not in EXCHANGES:
            raise refuse(
                f"exchange {name!r:.60}", rule=f"one of {', '.join(EXCHANGES)}", fix=suggest(str(name), EXCHANGES)
            )
        return EXCHANGES[name](*args[1:], **settings)


@dataclass(frozen=True, kw_only=True)
class Exchange(Keywords, metaclass=_ExchangeMeta):
    """A method that synchronizes replicas; its fields are the keys of `[parallel.exchange]` in a job.

    `Exchange("diloco", every=20)` constructs the subclass of that name. A subclass sets its kind by `replicas_differ`,
    `per_replica` and `every`, which may be fields, and implements the methods below.

    Attributes:
      name: The exchange's name in a job.
    """

    name: str
    every = 0  # number of steps between two `synchronize`; 0 for never
    replicas_differ = False  # whether parameters and optimizer states of replicas may differ
    averages_predictions = False  # whether evaluation runs all replicas on all examples and averages their outputs
    depends_on_shapes = (
        False  # whether its traffic depends on the shapes of parameters, not just on their number of elements
    )
    same_examples = False  # whether all replicas train on the same examples and draw the same random numbers
    global_model = MEAN  # if replicas differ: "mean", a key of the exchange's state, or "none"; see `global_model.py`
    per_replica = (
        True  # whether each replica computes its own gradients; else XLA sums them over `data` like over any axis
    )

    @property
    def leaves_optimizers(self) -> bool:
        """Whether a sync round changes parameters but leaves each replica's optimizer state as it is."""
        return self.replicas_differ and self.every > 0

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the exchange's state at step 0; () for none.

        An array with the shape of a parameter is equal on all replicas and sharded like the optimizer's. An array with
        an additional dim 0 of size `replicas`, or under the key "each", has one entry per replica; an array under the
        key "pieces" is split over the replicas (`piece_dim`). Any other array is replicated. The path of a parameter's
        array must end with the path of the parameter, as in {"anchor": params}.

        Args:
          params: The parameters with which all replicas begin.
          replicas: Number of replicas.
        """
        return ()

    def count(self, places: int) -> int:
        """Returns the number of replicas on an axis of `places` devices."""
        return places

    def begin(self, replicas: Replicas) -> Replicas:
        """Returns the replicas at step 0, given equal ones."""
        return replicas

    def gradients(self, local: Tree, state: Tree, between: "ReplicaMesh") -> tuple[Tree, Tree]:
        """Returns the gradients for the optimizer's update, and the new state of the exchange.

        Args:
          local: Each replica's gradient [replica, ...]. If replicas differ, it is the gradient of the mean loss of the
            replica's examples; else the mean over replicas is the gradient of the whole batch.
          state: The state of the exchange.
          between: The mesh and the specs of the gradients.

        Returns:
          Gradients [replica, ...] if replicas differ, else without that dim.
        """
        return (local if self.replicas_differ else between.mean(local)), state

    def problems(self, replicas: int) -> list[Problem]:
        """Returns the problems of the settings with this number of replicas."""
        return []

    def idle(self, parts: Mapping[str, ShardShape], replicas: int) -> list[Problem]:
        """Returns a problem if the exchange has no effect on a model.

        Args:
          parts: The part of each parameter that a device holds, by path.
          replicas: Number of replicas.
        """
        return []

    def sync_round(self, step: int) -> int:
        """Returns the number, from 1, of the sync round after a step; 0 for none. Each number is compiled separately.

        Args:
          step: Number of the step, from 1.
        """
        return int(bool(self.every) and step % self.every == 0)

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Synchronizes the replicas after a step.

        Args:
          replicas: The replicas after the step's update.
          between: The mesh, the specs of the parameters, and the number of the sync round.
        """
        return replicas

    def traffic(self, shards: Mapping[str, object], replicas: int) -> tuple[Traffic, ...]:
        """Returns the traffic of gradients and parameters between replicas.

        Args:
          shards: Shape and dtype of the shard of each parameter that one device holds, by path.
          replicas: Number of replicas.
        """
        return ()

    def optimizer_traffic(self, opt_state: Mapping[str, ShardShape], replicas: int) -> tuple[Traffic, ...]:
        """Returns the traffic of optimizer states between replicas.

        Args:
          opt_state: The part of each array of one replica's state that a device holds, by path.
          replicas: Number of replicas.
        """
        return ()

    def explain(self, sent: Iterable[Traffic]) -> str:
        """Describes in a sentence how replicas synchronize and how many bytes they send."""
        bytes_of: dict[int, float] = defaultdict(float)
        for traffic in sent:
            bytes_of[traffic.every] += traffic.collective.step_wire
        traffic = [
            f"{show_bytes(size)} a device " + (f"every {every} steps" if every > 1 else "every step")
            for every, size in sorted(bytes_of.items())
        ]
        replicas = "replicas differ" if self.replicas_differ else "replicas are equal"
        return f"{self}; {replicas}, and send {' and '.join(traffic) or 'nothing'}"

    def __str__(self) -> str:
        options = [option for option in fields(self) if option.name not in ("name", "every")]
        settings = ", ".join(
            f"{option.name}={value!r}" for option in options if (value := getattr(self, option.name)) != option.default
        )
        period = f" every {self.every} steps" if self.every > 1 else ""
        return f"{self.name}{period}" + (f" ({settings})" if settings else "")


# Shared by the settings of all exchanges: their table in a job, and their ranges.

SECTION = "parallel.exchange"
STEPS = 2**31 - 1


def check_algorithm(name: str) -> None:
    """Refuses an unknown all-reduce algorithm; "" is XLA's all-reduce.

    Raises:
      JaxparError: If no algorithm has that name.
    """
    if name:
        algorithms.check(name)


@dataclass(frozen=True, kw_only=True)
class AllReduce(Exchange):
    """All-reduce of gradients in every step.

    Attributes:
      name: How replicas over `data` synchronize: all_reduce (gradients are summed in every step).
    """

    name: str = "all_reduce"
    per_replica = False

    def traffic(self, shards: Mapping[str, object], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce per parameter, of the gradient of the shard that a device stores.

        With `fsdp`, XLA sums small gradients, such as those of biases, unsharded over both axes at once.
        """
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas)
