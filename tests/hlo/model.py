"""The programs whose compiled texts lie beside this file; run it under one jax after another to make them again.

    python tests/hlo/model.py        writes kinds_gpu_0.12.0.1.txt and the rest

Left out of the texts are this machine's paths, and what XLA repeats on every kernel; those that the
older release prints for the processor are not kept, they are the newer one's but for the groups.

The mesh is data=2 x tensor=4, on H100s that are not there or on simulated devices.
"""

import os
import re
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh.absent_gpus import target_devices

HERE = Path(__file__).parent
NOISE = re.compile(
    r', metadata=\{scheduling_name="[^"]*"\}'
    r'| scheduling_name="[^"]*"'
    r'|, backend_config=\{"operation_queue_id":"0","force_earliest_schedule":.*'
    r'|"force_earliest_schedule":false,"reification_cost":\[\],'
)
F32, BF16, F8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
MESH = {
    name: Mesh(np.array(devices).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    for name, devices in (("gpu", target_devices("h100:1x8")), ("cpu", jax.devices()))
}


def kinds(x, y):
    summed = lax.psum(x, "tensor")
    scattered = lax.psum_scatter(jnp.sin(summed), "tensor", tiled=True)
    swapped = lax.all_to_all(x, "tensor", 0, 0, tiled=True)
    around = lax.ppermute(swapped, "tensor", [(i, (i + 1) % 4) for i in range(4)])
    onward = lax.psum(lax.ppermute(y, "data", [(0, 1)]), ("data", "tensor"))
    return summed.sum() + scattered.sum() + around.sum(), lax.all_gather(y, "data", tiled=True), onward


def loops(x, most):
    def turn(_, x):
        return lax.fori_loop(0, 5, lambda _, x: lax.psum(jnp.sin(x), "tensor"), x) + lax.psum(x, "data")

    x = lax.fori_loop(0, 3, turn, x)
    x = lax.cond(most > 1, lambda x: lax.psum(x, "tensor"), lambda x: x, x)
    return lax.while_loop(lambda x: lax.pmax(x.sum(), ("data", "tensor")) < most, lambda x: lax.psum(x, "data"), x)


def layer(x, up, down):
    return jax.grad(lambda up, down: ((jnp.tanh(x @ up) @ down) ** 2).sum(), (0, 1))(up, down)


def gathered(*arrays):
    return [lax.with_sharding_constraint(x, NamedSharding(MESH["gpu"], P())) for x in arrays]


def scattered(*arrays):
    return [lax.psum_scatter(x, "tensor", tiled=True) for x in arrays]


def one_stage(x):
    return x + lax.ppermute(x, "data", [])


def named(x):
    with jax.named_scope('a "quoted" scope, body=%gone'):
        return lax.psum(x, "tensor")


def products(a, b, c, d):
    return a @ b, jnp.einsum("bij,bjk->bik", c, d)


def narrow(a, b):
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=BF16)


def convolution(x, kernel):
    def loss(x, kernel):
        return (
            lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2
        ).sum()

    return jax.value_and_grad(loss, (0, 1))(x, kernel)


def save(name, function, platform, *arrays, out=None, triton=True):
    mesh = MESH[platform]
    if out is not None:
        function = jax.shard_map(
            function, mesh=mesh, in_specs=tuple(spec for *_, spec in arrays), out_specs=out, check_vma=False
        )
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in arrays]
    options = {} if triton else {"xla_gpu_enable_triton_gemm": False}
    text = jax.jit(function).lower(*given).compile(compiler_options=options).as_text()
    path = HERE / f"{name}_{platform}_{jaxlib.__version__}.txt"
    path.write_text(NOISE.sub("", text.replace(f"{HERE}/", "")))
    print(path.name, path.stat().st_size)


def main():
    both = P("data", "tensor")
    matrices = [((512, 256), BF16, P("data")), ((256, 128), BF16, P())]
    batched = [((8, 256, 128), BF16, P("data")), ((8, 128, 64), BF16, P("data"))]
    images = [((16, 16, 16, 8), F32, P("data")), ((3, 3, 8, 32), F32, P())]
    for platform in MESH:
        save("kinds", kinds, platform, ((32, 256), F32, both), ((64, 128), BF16, P("data")), out=(P(), P(), P("data")))
        save("loops", loops, platform, ((16, 64), F32, both), ((), F32, P()), out=both)
        save("convolution", convolution, platform, *images)
    weights = [((64, 128), F32, P(None, "tensor")), ((128, 64), F32, P("tensor"))]
    save("layer", layer, "gpu", ((16, 64), F32, P("data")), *weights)
    save("gathered", gathered, "gpu", *[((64, 16 + i), F32, P("data")) for i in range(6)])
    rows = P(("data", "tensor"))
    three = [((64, 16), F32, P("data")), ((128, 8), BF16, P("data")), ((64, 8), F32, P("data"))]
    save("scattered", scattered, "gpu", *three, out=[rows] * 3)
    save("one_stage", one_stage, "gpu", ((16, 8), F32, P("data")), out=P("data"))
    save("named", named, "gpu", ((16, 64), F32, both), out=P("data"))
    save("products", products, "gpu", *matrices, *batched)
    save("cublas", products, "gpu", *matrices, *batched, triton=False)
    save("narrow", narrow, "gpu", ((512, 256), F8, P("data")), ((128, 256), F8, P()), triton=False)


if __name__ == "__main__":
    main()
