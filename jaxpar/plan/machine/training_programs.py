"""Software models of other training programs with published runs, each stated as a difference from a full model.

    eager PyTorch        twice the elementwise traffic of torch.compile, and the host's time between steps
    compiled PyTorch     `software.TORCHTITAN`
    Megatron Core        with Transformer Engine: fused ops, cuDNN's attention, gradients overlapped with computation
    InternLM             eager PyTorch; its ZeRO-1 sums whole gradients, and owners of arrays broadcast them
    MaxText              `software.MAXTEXT`; Pax without Transformer Engine has XLA's own attention

Fitted numbers come from published runs: `python -m tests.bench.planner --leave-out group` prints them.
"""

from dataclasses import replace

from jaxpar.plan.machine.kernels import CUDNN, FLASH_1, FLASH_2
from jaxpar.plan.machine.software import HOST, MAXTEXT, TORCHTITAN

UNFUSED = 2.04  # traffic of unfused elementwise ops over that with torch.compile; fitted

EAGER = replace(
    TORCHTITAN,
    kernel=FLASH_2,
    stream=(UNFUSED * TORCHTITAN.stream[0], UNFUSED * TORCHTITAN.stream[1]),
    inner=(UNFUSED * TORCHTITAN.inner[0], UNFUSED * TORCHTITAN.inner[1]),
    update=60.0,  # fitted: 1.5 times the traffic of its ops, in one kernel per parameter
    host=HOST,
    source="PyTorch's FSDP without torch.compile: elementwise ops, update and host fitted; else as TORCHTITAN",
)

EAGER_FLASH_1 = replace(
    EAGER,
    kernel=FLASH_1,
    source=f"llm-foundry in 2023, with FlashAttention in Triton; {EAGER.source}",
)

INTERNLM = replace(
    EAGER_FLASH_1,  # of Triton; InternLM has CUDA's v1.0.5: doc/en/install.md
    # accumulating a microbatch's gradient reads 2 + 2 and writes 2; the first is not accumulated, but once a step
    # buckets are filled, divided and emptied, which moves 12
    accumulate=6.0,
    wire=(2.0, 2.0),  # `reduce_tensor` with the dtype of the parameters
    bucket=2.0 * 512 * 2**20,  # reduce_bucket_size=512 * 1024 * 1024 elements: configs/7B_sft.py
    reduce_whole=True,  # dst_rank is None: all_reduce over ParallelMode.DATA
    broadcast_arrays=9,  # qkv and output with biases, three of the feed-forward, two norms
    exposed_update=True,  # `broadcast_params(overlap=False)`
    source="InternLM's HybridZeroOptimizer as first released, internlm/solver/optimizer/hybrid_zero_optim.py "
    "@fa7337b3; nothing of it fitted, else as EAGER_FLASH_1",
)

FMS = replace(
    TORCHTITAN,
    wire=(2.0, 2.0),
    source="fms-fsdp: mixed precision bfSixteen reduces gradients in bfloat16, fms_fsdp/policies/mixed_precision.py; "
    "compiled; else as TORCHTITAN",
)

MEGATRON_CORE = replace(
    TORCHTITAN,
    kernel=CUDNN,
    core=(0.535, 0.45),
    tensor_overlap=0.5,  # assumed, as of Megatron-LM in 2022
    # TransformerEngine, AttnFuncWithCPAndKVAllGather, "Refer section 3.3.2 of The Llama 3 Herd of Models": k and v are
    # saved before they are gathered; the distributed optimizer shards over the group of data and context
    regather_context=True,
    source="Megatron Core with Transformer Engine: fused elementwise ops and cuDNN's attention; gradients and "
    "parameters travel beside computation, as in TORCHTITAN",
)

PAX = replace(
    MAXTEXT,
    attention="unfused",
    kernel=None,
    core=(0.6, 0.5),  # assumed, as of Megatron-LM's
    scores=(13.0, 19.0),  # as of Megatron-LM's
    saved_scores=(5.0, 2.0),
    source="Pax without Transformer Engine: scores in memory, as many bytes as Megatron-LM's; else as MAXTEXT",
)
