"""A layer's matrix is gathered as the slice of its stack that it is, with the dims of a matrix."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.parallel.read_parameter import gather


@pytest.mark.parametrize(("shape", "named"), [((8, 8), ["fsdp", None]), ((8,), [None])])
def test_a_matrix_is_named_as_stored_before_it_is_gathered(shape, named):
    """Small vectors come gathered: to name them as stored would scatter them first."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    used, stored = NamedSharding(mesh, PartitionSpec(None)), NamedSharding(mesh, PartitionSpec("fsdp"))
    forward = jax.make_jaxpr(lambda x: jax.vjp(lambda x: gather(x, used, stored), x)[0])(jnp.ones(shape))
    found = [eqn.params["sharding"].spec[0] for eqn in forward.eqns if eqn.primitive.name == "sharding_constraint"]
    assert found == named
