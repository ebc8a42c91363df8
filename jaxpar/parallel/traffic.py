"""The messages of the replicas over `data`, as their exchange declares them."""

from jaxpar.exchange.shard_shape import ShardShape
from jaxpar.exchange.traffic import Traffic
from jaxpar.parallel.layout_data import LayoutData
from jaxpar.parallel.placement import Placement
from jaxpar.sharding.shard_bytes import shard_shape


def replica_messages(layout: LayoutData) -> tuple[Traffic, ...]:
    """Returns the messages of the replicas over `data`, by their exchange; empty for a single replica."""
    replicas = layout.sizes["data"]
    return (
        (*layout.parallel.exchange.traffic(trained_shards(layout), replicas), *layout.opt_state_messages)
        if replicas > 1
        else ()
    )


def trained_shards(layout: LayoutData) -> dict[str, ShardShape]:
    """Path of each trained parameter to the shard that a device stores between steps."""

    def one(place: Placement) -> ShardShape:
        shape = shard_shape(place.leaf.shape, place.stored, layout.sizes)
        return ShardShape(shape, place.leaf.dtype, layers=place.names[:1] == ("layers",), total_size=place.leaf.size)

    return {path: one(place) for path, place in layout.placements.items() if path not in layout.frozen}


def sync_note(layout: LayoutData) -> str:
    """How replicas with per-replica steps synchronize, as a sentence; "" where XLA sums their gradients."""
    exchange = layout.parallel.exchange
    return f"exchange: {exchange.explain(replica_messages(layout))}" if exchange.per_replica else ""
