"""Which devices there are: those of the machine, or simulated ones on its processor."""

import logging

import jax

from jaxpar.errors import refuse

PLUGIN = "jax_plugins.xla_cuda13"  # XLA's compiler for NVIDIA GPUs


def hush_plugin() -> None:
    """Keeps the plugin from saying in every process that it misses its other half, which only running needs."""
    log = logging.getLogger(PLUGIN)
    if not log.filters:
        log.addFilter(lambda record: "is not found" not in record.getMessage())


def simulate(count: int) -> None:
    """Makes this process see `count` simulated devices on the processor, and nothing else.

    Must come before the first use of a device: JAX creates its devices once.

    Raises:
      JaxparError: If `count` is not positive, or the devices exist already and are others.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise refuse(f"simulate({count!r})", rule="a positive whole number of devices", fix="simulate(8)")
    hush_plugin()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # the devices exist already; whether they are the ones asked for is checked next
    if jax.default_backend() != "cpu" or jax.device_count() != count:
        raise refuse(
            f"simulate({count}) after JAX made {describe(jax.devices())}",
            rule="devices are simulated before the first one is used, once per process",
            fix="call it first thing in the program or notebook, or restart the kernel",
        )


def is_simulated(devices) -> bool:
    """Returns whether speed on these devices says nothing about hardware (several CPU devices)."""
    return any(device.platform == "cpu" for device in devices)


def describe(devices) -> str:
    """Returns `8 x NVIDIA H200` or `8 x cpu (simulated)`."""
    kind = devices[0].device_kind
    return f"{len(devices)} x {kind}{' (simulated)' if is_simulated(devices) and len(devices) > 1 else ''}"
