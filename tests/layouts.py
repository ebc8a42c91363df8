"""The layouts that every contract holds on, and where ZeRO says that bytes lie."""

import jax

import jaxpar as jp

LAYOUTS = {
    "ddp": jp.Parallel(data=8),
    "zero1": jp.Parallel(fsdp=8, zero=1),
    "zero2": jp.Parallel(fsdp=8, zero=2),
    "zero3": jp.Parallel(fsdp=8, zero=3),
    "hsdp": jp.Parallel(data=2, fsdp=4),
    "tp": jp.Parallel(data=4, tensor=2),
    "tp+sp": jp.Parallel(data=2, tensor=4, sequence=True),
    "2x2x2 zero0": jp.Parallel(data=2, fsdp=2, tensor=2, zero=0),
    "2x2x2 zero1": jp.Parallel(data=2, fsdp=2, tensor=2, zero=1),
    "2x2x2 zero2": jp.Parallel(data=2, fsdp=2, tensor=2, zero=2, sequence=True),
    "2x2x2 zero3": jp.Parallel(data=2, fsdp=2, tensor=2, zero=3),
}


def kept_bytes(layout):
    """Returns the bytes of parameters that ZeRO keeps on one device, with what does not divide counted whole.

    P bytes of parameters after `tensor`, W of them in arrays that fsdp = N does not divide:
    P in stage 0, (P - W)/N + W in others.
    """
    ways, stage, tensor = layout.sizes["fsdp"], layout.parallel.stage, layout.sizes["tensor"]
    split = whole = 0
    for place in layout.placements.values():
        mine = place.leaf.bytes // (tensor if "tensor" in str(place.used) and tensor > 1 else 1)
        dims = [
            size // (tensor if "tensor" in str(place.used[d : d + 1]) else 1) for d, size in enumerate(place.leaf.shape)
        ]
        divides = any(size % ways == 0 for size, name in zip(dims, place.names, strict=True) if name != "layers")
        split, whole = (split + mine, whole) if divides else (split, whole + mine)
    return split // ways + whole if stage >= 1 else split + whole


def on_device(tree):
    """Returns the bytes of a tree on its first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
