"""The chips and the software of published runs, by the names that tables of runs have for them."""

from collections.abc import Callable, Mapping

from jaxpar.plan.machine.hardware import HARDWARE, Hardware, cap
from jaxpar.plan.machine.software import MAXTEXT, MEGATRON_2022, MEGATRON_BLOCKING, TORCHTITAN, SoftwareModel
from jaxpar.plan.machine.training_programs import EAGER, EAGER_FLASH_1, FMS, INTERNLM, MEGATRON_CORE, PAX

CHIPS: Mapping[str, Hardware] = {
    "A100": HARDWARE["a100"],
    "A100-40": cap(
        HARDWARE["a100"],
        peak=312e12,
        bandwidth=1.555e12,
        source="NVIDIA A100 datasheet, SXM 40GB: 312 TFLOPS bf16, 40 GB at 1,555 GB/s",
    ),
    "H100": HARDWARE["h100"],
    "H100-500W": cap(
        HARDWARE["h100"],
        peak=795e12,
        bandwidth=2.4e12,
        source="torchtitan: HBM2e of 2.4 TB/s, limited to 500 W, peak \"between SXM and NVL, and we don't know its "
        "exact value\": fitted on its runs, below the NVL's 835.5e12",
    ),
    "H200": HARDWARE["h200"],
    "B200": HARDWARE["b200"],
}  # fmt: skip

PRACTICES: Mapping[str, SoftwareModel] = {
    "TORCHTITAN": TORCHTITAN,
    "MAXTEXT": MAXTEXT,
    "MEGATRON_2022": MEGATRON_2022,
    "MEGATRON_BLOCKING": MEGATRON_BLOCKING,
    "MEGATRON_CORE": MEGATRON_CORE,
    "EAGER": EAGER,
    "EAGER_FLASH_1": EAGER_FLASH_1,
    "FMS": FMS,
    "INTERNLM": INTERNLM,
    "PAX": PAX,
}
GPT = ("MEGATRON_2022", "MEGATRON_BLOCKING")  # of models with biases and learned positions
SUFFIXES: Mapping[str, Mapping[str, object]] = {  # a practice with one of these is otherwise as without
    "pure": {"wire": (2.0, 2.0)},  # gradients travel in bfloat16
    "asynctp": {"tensor_overlap": 0.5},  # assumed, as of Megatron-LM's
}
# systems whose practice is known, whatever a table calls it: by the whole row
SYSTEMS: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    "llm-foundry": lambda row: "EAGER_FLASH_1",
    "torchtitan": lambda row: "TORCHTITAN" if _compiled(row) else "EAGER",
    "fms-fsdp": lambda row: "FMS",
    "InternLM": lambda row: "INTERNLM",
    "JAX-Toolbox Pax": lambda row: "PAX",
    "Megatron-DeepSpeed": lambda row: "MEGATRON_BLOCKING",
    "Meta": lambda row: "MEGATRON_CORE",
}
# systems whose pipelines are interleaved with a layer in each chunk, which tables leave out: arXiv 2407.21783, 3.3.2
INTERLEAVED = ("Meta",)


def _compiled(row: Mapping[str, str]) -> bool:
    """Returns whether a run of torchtitan was compiled, as its source has it; asynchronous tensor parallelism is."""
    source = row["source"].lower().replace("no compile", "")
    return "compile" in source or row.get("practice", "").endswith("asynctp")
