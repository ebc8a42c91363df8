"""The protocol of an exchange: how replicas of a model, each with different examples, synchronize.

    every step                 gradients of each replica ─► gradients(...) ─► its update
    every N steps more                                                            └─► agree(...) ─► next step

Trees of replicas have a leading dim `replica`, split over the mesh axis `data`: each replica holds its own entry, and
sums over that dim are the traffic. These trees leave out parameters that the optimizer freezes.
"""

from abc import ABCMeta
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Keywords, Problem, refuse, suggest
from jaxpar.exchange.collectives import algorithms
from jaxpar.exchange.traffic import ShardShape, Traffic
from jaxpar.units import show_bytes

if TYPE_CHECKING:
    from jaxpar.exchange.replica_mesh import ReplicaMesh


Tree = Any  # a nested dict of arrays, or of their stand-ins


def flatten_by_path(tree: Tree) -> tuple[dict[str, Any], Any]:
    """Returns the arrays of a tree by path, and the tree's structure."""
    import jax

    from jaxpar.sharding.names import path_of

    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {path_of(keys): leaf for keys, leaf in leaves}, structure


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The state of all replicas at a sync round.

    Attributes:
      params: Their parameters, [replica, ...] each where replicas differ.
      opt_state: Their optimizer states, likewise.
      exchange_state: The state of the exchange, as `Exchange.init` made it.
      model_state: Their other state, such as averages of BatchNorm: [replica, ...].
    """

    params: Tree
    opt_state: Tree
    exchange_state: Tree
    model_state: Tree = ()


MEAN, NO_MODEL = "mean", "none"  # values of `Exchange.global_model` that are not keys of `own`
EXCHANGES: dict[str, type["Exchange"]] = {}  # by name in a job; `table` fills it


class _Named(ABCMeta):
    """The metaclass of exchanges: `Exchange("diloco", every=20)` makes a `DiLoCo`."""

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
class Exchange(Keywords, metaclass=_Named):
    """How replicas synchronize; its fields are the keys of `[parallel.exchange]` in a job.

    `Exchange("diloco", every=20)` makes the subclass of that name. A subclass declares its kind by `replicas_differ`,
    `per_replica` and `every`, which may be fields, and implements the methods below.

    Attributes:
      name: The exchange's name in a job.
    """

    name: str
    every = 0  # steps from one `agree` to the next; 0: never
    replicas_differ = False  # whether parameters and optimizer states of replicas may differ
    averages_predictions = False  # whether evaluation shows all examples to all replicas and averages their outputs
    depends_on_shapes = (
        False  # whether its traffic depends on the shapes of parameters, not just on their number of elements
    )
    same_examples = False  # whether all replicas see the same examples and draw the same random numbers
    global_model = (
        MEAN  # where replicas differ: "mean", the key of `own` with the parameters, or "none"; see `global_model`
    )
    per_replica = (
        True  # whether each replica computes its own gradients; else XLA sums them over `data` like over any axis
    )

    @property
    def leaves_optimizers(self) -> bool:
        """Whether a sync round changes parameters but leaves each replica's optimizer state as it is."""
        return self.replicas_differ and self.every > 0

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the exchange's state at step 0; () for none.

        An array of a parameter's shape is shared by the replicas and placed like the optimizer's. One with a dim of
        `replicas` in front of that has an entry on each replica, as has one under the key "each"; one under the key
        "pieces" has a piece on each (`piece_dim`). All others are replicated. The path of an array of a parameter must
        end with the parameter's, as in {"anchor": params}.

        Args:
          params: The parameters with which all replicas begin.
          replicas: Number of replicas.
        """
        return ()

    def count(self, places: int) -> int:
        """Returns the number of replicas on an axis of `places` devices."""
        return places

    def begin(self, replicas: Replicas) -> Replicas:
        """Returns the replicas at step 0; the given ones are equal."""
        return replicas

    def gradients(self, local: Tree, state: Tree, between: "ReplicaMesh") -> tuple[Tree, Tree]:
        """Returns the gradients for the optimizer's update, and the new state of the exchange.

        Args:
          local: Each replica's gradient [replica, ...]. Where replicas differ it is that of the mean loss of their own
            examples; else the mean over replicas is the gradient of the whole batch.
          state: The state of the exchange.
          between: The mesh and the specs of the gradients.

        Returns:
          Gradients [replica, ...] where replicas differ, else without that dim.
        """
        return (local if self.replicas_differ else between.mean(local)), state

    def problems(self, replicas: int) -> list[Problem]:
        """Returns the errors of its settings for so many replicas."""
        return []

    def idle(self, parts: Mapping[str, ShardShape], replicas: int) -> list[Problem]:
        """Returns a problem if the exchange does nothing for a model.

        Args:
          parts: Path of each parameter to the part that a device holds.
          replicas: Number of replicas.
        """
        return []

    def sync_round(self, step: int) -> int:
        """Returns the number of the sync round that ends a step, from 1; 0 for none. Each number has its own program.

        Args:
          step: Its number, from 1.
        """
        return int(bool(self.every) and step % self.every == 0)

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Returns the synchronized replicas.

        Args:
          replicas: After the step's own update.
          between: The mesh, the specs of the parameters, and the number of the sync round.
        """
        return replicas

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns the traffic of gradients and parameters between replicas.

        Args:
          shards: Path of each parameter to shape and dtype of the shard that one device holds.
          replicas: Number of replicas.
        """
        return ()

    def optimizer_traffic(self, opt_state: Mapping[str, ShardShape], replicas: int) -> tuple[Traffic, ...]:
        """Returns the traffic of optimizer states between replicas.

        Args:
          opt_state: Path of each array of one replica's state to the part that a device holds.
          replicas: Number of replicas.
        """
        return ()

    def explain(self, sent: Iterable[Traffic]) -> str:
        """Returns a sentence about how replicas synchronize and how many bytes they send."""
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


# What the settings of all exchanges share: their table in a job, and their ranges.

SECTION = "parallel.exchange"
STEPS = 2**31 - 1


def check_algorithm(name: str) -> None:
    """Refuses an unknown all-reduce; "" is XLA's own.

    Raises:
      JaxparError: If there is none of that name.
    """
    if name:
        algorithms.check(name)
