"""The part of a state that an exchange synchronizes: it does not get frozen parameters, which are always equal."""

import dataclasses
from dataclasses import dataclass

from jaxpar.exchange.base import Replicas
from jaxpar.exchange.replica_mesh import ReplicaMesh
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.layout_data import trained_shards
from jaxpar.parallel.specs import optimizer_specs, stored_specs
from jaxpar.sharding.names import Tree
from jaxpar.step.parameters.frozen import drop_paths, fill_missing
from jaxpar.step.state import State, replica_shapes


@dataclass(frozen=True)
class TrainedState:
    """Reads what an exchange synchronizes from a state, and writes it back.

    Attributes:
      layout: The sharding of all arrays.
      frozen: Paths of frozen parameters.
    """

    layout: Layout
    frozen: frozenset[str]

    def drop_frozen(self, tree: Tree) -> Tree:
        """Removes frozen parameters from a tree of parameters, gradients or specs."""
        return drop_paths(self.frozen, tree)

    def replica_mesh(self, specs: Tree) -> ReplicaMesh:
        """Returns the mesh of the replicas, with the specs of the trained parameters."""
        return ReplicaMesh(
            mesh=self.layout.device_mesh, specs=self.drop_frozen(specs), parts=trained_shards(self.layout)
        )

    def read(self, state: State, sync_round: int) -> tuple[Replicas, ReplicaMesh]:
        """Returns the inputs of an exchange: the replicas of a state, and their specs."""
        differ = self.layout.parallel.exchange.replicas_differ
        opt_specs = optimizer_specs(self.layout, replica_shapes(state.optimizer) if differ else state.optimizer)
        replica_mesh = dataclasses.replace(
            self.replica_mesh(stored_specs(self.layout)), optimizer=opt_specs, sync_round=sync_round
        )
        inputs = Replicas(
            params=self.drop_frozen(state.params),
            opt_state=state.optimizer,
            exchange_state=state.exchange,
            model_state=state.model_state,
        )
        return inputs, replica_mesh

    def write(self, state: State, replicas: Replicas) -> State:
        """Returns the state with these replicas."""
        params = fill_missing(replicas.params, state.params)
        return State(state.step, params, replicas.opt_state, replicas.model_state, replicas.exchange_state)
