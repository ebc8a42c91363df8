"""The protocol of an exchange: how replicas of a model, each with other examples, come to agree.

    every step                 gradients of each replica ─► gradients(...) ─► its update
    every so many steps more                                                      └─► agree(...) ─► next step

Trees of replicas have a leading dim `replica`, split over the mesh axis `data`: each replica holds its own entry, and a
sum over that dim is what travels. Parameters that the optimizer leaves as they are, are in none of these trees.
"""

from abc import ABCMeta
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Keywords, Problem, nearest, refuse
from jaxpar.exchange.part import Part
from jaxpar.exchange.sent import Sent
from jaxpar.units import show_bytes

if TYPE_CHECKING:
    from jaxpar.exchange.between import Between

Tree = Any  # a nested dict of arrays, or of what stands for them


def by_path(tree: Tree) -> tuple[dict[str, Any], Any]:
    """Returns a tree as arrays by path, and its structure."""
    import jax

    from jaxpar.sharding.names import path_of

    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {path_of(keys): leaf for keys, leaf in leaves}, structure


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas where they meet.

    Attributes:
      params: Their parameters, [replica, ...] each where replicas differ.
      optimizer: Their optimizer states, likewise.
      own: The state of the exchange, as `Exchange.init` made it.
      model_state: Their other state, such as averages of BatchNorm: [replica, ...].
    """

    params: Tree
    optimizer: Tree
    own: Tree
    model_state: Tree = ()


MEAN, NO_MODEL = "mean", "none"  # values of `Exchange.global_model` that are no key
EXCHANGES: dict[str, type["Exchange"]] = {}  # by the name that a job has for it; `table` fills it


class _Named(ABCMeta):
    """The type of exchanges: `Exchange("diloco", every=20)` makes the one of that name."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        if cls is not Exchange:
            return super().__call__(*args, **settings)
        name = args[0] if args else settings.pop("name", "")
        if not isinstance(name, str) or name not in EXCHANGES:
            raise refuse(
                f"exchange {name!r:.60}", rule=f"one of {', '.join(EXCHANGES)}", fix=nearest(str(name), EXCHANGES)
            )
        return EXCHANGES[name](*args[1:], **settings)


@dataclass(frozen=True, kw_only=True)
class Exchange(Keywords, metaclass=_Named):
    """A way in which replicas agree; its fields are the keys of `[parallel.exchange]` in a job.

    `Exchange("diloco", every=20)` is the one of that name. A subclass says what it is by `differ`, `apart` and `every`,
    which may be fields, and what it does by its methods.

    Attributes:
      name: What a job calls it.
    """

    name: str
    every = 0  # steps from one `agree` to the next; 0 for an exchange that has none
    differ = False  # whether parameters and optimizer states of replicas may differ
    averages_predictions = False  # whether an evaluation shows all examples to all, and averages what they return
    of_shapes = False  # whether what it sends depends on the shapes of parameters, not just on how many there are
    same_examples = False  # whether all see the same examples and draw the same random numbers, as one alone would
    global_model = (
        MEAN  # of replicas that differ: "mean", the key of `own` that has its parameters, or "none"; see there
    )
    apart = True  # whether replicas make their steps apart; else XLA sums gradients over them like over any axis

    @property
    def leaves_optimizers(self) -> bool:
        """Whether a meeting changes parameters, and leaves what each replica's optimizer keeps of them as it is."""
        return self.differ and self.every > 0

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the state of its own at step 0; () for none.

        An array of a parameter's shape is shared, and placed as that of an optimizer is; one with a dim of `replicas`
        before that has an entry on each replica, as has one under the key "each"; one under the key "pieces" has a
        piece on each (`piece_dim`). All others are whole everywhere. The path of an array of a parameter must end with
        the parameter's, as in {"anchor": params}.

        Args:
          params: The parameters with which all replicas begin.
          replicas: How many.
        """
        return ()

    def count(self, places: int) -> int:
        """Returns how many replicas there are on an axis of so many devices."""
        return places

    def begin(self, replicas: Replicas) -> Replicas:
        """Returns replicas as they begin; those that are given are equal."""
        return replicas

    def gradients(self, local: Tree, own: Tree, between: "Between") -> tuple[Tree, Tree]:
        """Returns the gradients that the update takes, and the state of its own.

        Args:
          local: Each replica's gradient [replica, ...]. Where replicas differ it is that of the mean loss of their own
            examples; else the mean over replicas is the gradient of the whole batch.
          own: The state of the exchange.
          between: Where gradients are.

        Returns:
          Gradients [replica, ...] where replicas differ, else without that dim.
        """
        return (local if self.differ else between.mean(local)), own

    def problems(self, replicas: int) -> list[Problem]:
        """Returns what is wrong with it between so many replicas."""
        return []

    def idle(self, parts: Mapping[str, Part], replicas: int) -> list[Problem]:
        """Returns whether it does nothing for a model.

        Args:
          parts: Path of each parameter to what a device holds of it.
          replicas: How many.
        """
        return []

    def meeting(self, step: int) -> int:
        """Returns which of its meetings a step ends with, from 1; 0 for none. Each kind is a program of its own.

        Args:
          step: Its number, from 1.
        """
        return int(bool(self.every) and step % self.every == 0)

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the replicas after they met.

        Args:
          replicas: After the step's own update.
          between: Where parameters are, and which meeting it is.
        """
        return replicas

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns what replicas send each other.

        Args:
          shards: Path of each parameter to shape and dtype of the part that one device holds.
          replicas: How many.
        """
        return ()

    def sends_held(self, held: Mapping[str, Part], replicas: int) -> tuple[Sent, ...]:
        """Returns what replicas send each other of their optimizers' states.

        Args:
          held: Path of each array of one replica's state to what a device holds of it.
          replicas: How many.
        """
        return ()

    def explain(self, sent: Iterable[Sent]) -> str:
        """Returns in a sentence how replicas agree, and what that sends."""
        bytes_of: dict[int, float] = defaultdict(float)
        for each in sent:
            bytes_of[each.every] += each.collective.step_wire
        each = [
            f"{show_bytes(size)} a device " + (f"every {every} steps" if every > 1 else "every step")
            for every, size in sorted(bytes_of.items())
        ]
        replicas = "replicas differ" if self.differ else "replicas are equal"
        return f"{self}; {replicas}, and send {' and '.join(each) or 'nothing'}"

    def __str__(self) -> str:
        own = [each for each in fields(self) if each.name not in ("name", "every")]
        settings = ", ".join(
            f"{each.name}={value!r}" for each in own if (value := getattr(self, each.name)) != each.default
        )
        often = f" every {self.every} steps" if self.every > 1 else ""
        return f"{self.name}{often}" + (f" ({settings})" if settings else "")
