"""The constants that published runs are there to fit: what each is, before they speak, and where it belongs.

Each is one number for every run that it concerns, of whatever group; none belongs to a run or a group alone but where
one group alone has the software. A fit starts from what is usual and is held to it by how surely that is known.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.kernels import FLASH_1
from jaxpar.plan.machine.software import TORCHTITAN, SoftwareModel

from ..published.read import Run

EAGER = ("EAGER", "EAGER_FLASH_1", "INTERNLM")
XLA = ("MAXTEXT", "PAX")
NVL = 835.5e12  # bfloat16 peak of an H100 NVL, near which that of torchtitan's cards of 500 W lies
Machine = tuple[Hardware, SoftwareModel]
Put = Callable[[Hardware, SoftwareModel, float, Run], Machine]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the model.

    Attributes:
      usual: What it is where nothing is known but this: from papers and measurements of single kernels, or assumed.
      spread: How far from that it may well be: a standard deviation of its logarithm.
      concerns: Whether it has a part in a run.
      put: Returns hardware and software with a value of it.
      most: What it cannot be above.
    """

    usual: float
    spread: float
    concerns: Callable[[Run], bool]
    put: Put
    most: float = 1e30


def _gemm(key: str) -> Put:
    return lambda h, s, v, _: (replace(h, gemm=replace(h.gemm, **{key: v})), s)


def _kernel(
    change: Callable[[Any, float], Mapping[str, Any]],
) -> Callable[[Hardware, SoftwareModel, float, Run], Machine]:
    def put(hardware: Hardware, software: SoftwareModel, value: float, run: Run) -> Machine:
        kernel = software.kernel
        return hardware, software if kernel is None else replace(
            software, kernel=replace(kernel, **change(kernel, value))
        )

    return put


def _software(
    change: Callable[[float, Run], Mapping[str, Any]],
) -> Callable[[Hardware, SoftwareModel, float, Run], Machine]:
    return lambda h, s, v, run: (h, replace(s, **change(v, run)))


def _slower_card(hardware: Hardware, software: SoftwareModel, value: float, run: Run) -> Machine:
    return replace(hardware, chip=replace(hardware.chip, bf16_flops=NVL * value)), software


def _chip(key: str) -> Callable[[Run], bool]:
    return lambda run: run.hardware.chip.key == key


def _flash_1(run: Run) -> bool:
    return run.software.kernel is not None and run.software.kernel.name == FLASH_1.name


def _scaled(chip: str | None, which: int) -> Callable[[Any, float], Mapping[str, Any]]:
    """Returns how shares of a kernel follow from one of another chip, or of the other direction."""

    def change(kernel: Any, value: float) -> Mapping[str, Any]:
        found = dict(kernel.shares)
        for key, pair in found.items():
            if which:
                found[key] = (pair[0], pair[0] * value)
            elif chip is None or key == chip:
                base = value if chip is None else found["a100"][0] * value
                found[key] = (base, base)
        return {"shares": found}

    return change


CONSTANTS: Mapping[str, Constant] = {
    "matmuls on A100, share of the peak": Constant(usual=0.80, spread=0.10, concerns=_chip("a100"), put=_gemm("top")),
    "matmuls on H100, share of the peak": Constant(usual=0.70, spread=0.15, concerns=_chip("h100"), put=_gemm("top")),
    "H100 of 500 W, its peak over the NVL's": Constant(
        usual=1.0, spread=0.05, concerns=lambda run: run.gpu == "H100-500W", put=_slower_card
    ),
    "a wave of tiles, seconds": Constant(usual=2e-6, spread=0.7, concerns=lambda _: True, put=_gemm("wave")),
    "the last wave, share lost": Constant(
        usual=0.3, spread=0.5, concerns=lambda _: True, put=_gemm("ragged"), most=1.0
    ),
    "jitter from device to device": Constant(
        usual=0.01, spread=0.4, concerns=lambda _: True, put=lambda h, s, v, _: (replace(h, jitter=v), s)
    ),
    "FlashAttention in Triton on A100, share": Constant(
        usual=0.34, spread=0.4, concerns=_flash_1, put=_kernel(_scaled(None, 0))
    ),
    "the same on H100, over A100's": Constant(
        usual=0.57, spread=0.15, concerns=lambda run: _flash_1(run) and _chip("h100")(run),
        put=_kernel(_scaled("h100", 0)),
    ),
    "the same backward, over forward": Constant(
        usual=0.9, spread=0.2, concerns=_flash_1, put=_kernel(_scaled(None, 1))
    ),
    "attention, length at which half is lost": Constant(
        usual=200.0, spread=0.7, concerns=lambda run: run.software.kernel is not None,
        put=_kernel(lambda _, v: {"short": v}),
    ),
    "attention, lost with heads of 64": Constant(
        usual=0.3, spread=0.5, concerns=lambda run: run.software.kernel is not None,
        put=_kernel(lambda _, v: {"narrow": v}),
    ),
    "elementwise ops, eager over compiled": Constant(
        usual=1.7, spread=0.3, concerns=lambda run: run.practice in EAGER,
        put=_software(lambda v, _: {
            "stream": tuple(v * each for each in TORCHTITAN.stream),
            "inner": tuple(v * each for each in TORCHTITAN.inner),
        }),
    ),
    "update, eager over compiled": Constant(
        usual=1.5, spread=0.4, concerns=lambda run: run.practice in EAGER,
        put=_software(lambda v, _: {"update": v * TORCHTITAN.update}),
    ),
    "host, seconds of an eager step": Constant(
        usual=0.03, spread=0.8, concerns=lambda run: run.practice not in XLA,
        put=_software(lambda v, run: {"host": v if run.practice in EAGER else v / 2}),
    ),
    "interference of hidden collectives": Constant(
        usual=0.5, spread=0.4, concerns=lambda run: run.software.interference > 0,
        put=_software(lambda v, _: {"interference": v}),
    ),
    "gathers that XLA hides": Constant(
        usual=0.7, spread=0.2, concerns=lambda run: run.practice in XLA, put=_software(lambda v, _: {"overlap": v}),
        most=1.0,
    ),
    "an op that is waited for, seconds": Constant(
        usual=1e-4, spread=0.7, concerns=lambda run: run.practice == "MEGATRON_BLOCKING",
        put=_software(lambda v, _: {"host_stalls": (20 * v, 40 * v)}),
    ),
}  # fmt: skip


def machine(run: Run, values: Mapping[str, float]) -> Machine:
    """Returns the hardware and the software of a run with these values of the constants."""
    hardware, software = run.hardware, run.software
    for name, constant in CONSTANTS.items():
        if constant.concerns(run):
            hardware, software = constant.put(hardware, software, values[name], run)
    return hardware, software
