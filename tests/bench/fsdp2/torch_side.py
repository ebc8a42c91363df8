"""PyTorch's side: FSDP2 over two processes, as its own trainers write it. Imports nothing of jaxpar that computes.

Its own choices: fused q/k/v and gate/up, flash attention, blocks compiled one by one and sharded one by one, the last
norm with the head, which stays whole from its forward to its backward pass, fused AdamW after clipping.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from ..fsdp2.turns import serve
from ..gpu.jobs.torch_twin import build


def steps(torch: Any, settings: dict[str, Any], mesh: Any, *, remat: bool) -> Callable[[int], float]:
    """Returns what makes so many steps and returns the last loss."""
    shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    wrapper = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    train, own = settings["train"], settings["model"]
    torch.manual_seed(0)
    model = build(torch, own)
    for i, block in enumerate(model.blocks):
        kept = wrapper.checkpoint_wrapper(block) if remat else block
        kept.compile()
        model.blocks[i] = shard(kept, mesh=mesh)
    shard(model.embed, mesh=mesh)
    shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train["learning_rate"], betas=(train["beta1"], train["beta2"]),
        weight_decay=train["weight_decay"], fused=True,
    )  # fmt: skip
    rank, share = mesh.get_local_rank(), train["rows"] // mesh.size()
    tokens = torch.randint(own["vocab"], (train["rows"], own["seq"] + 1))[rank * share : (rank + 1) * share]

    def run(count: int) -> float:
        for _ in range(count):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train["clip"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return run


if __name__ == "__main__":
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(
        "cpu", (int(os.environ["WORLD_SIZE"]),)
    )
    given = json.loads(sys.argv[1])
    serve(
        torch.__version__,
        {"none": steps(torch, given, mesh, remat=False), "full": steps(torch, given, mesh, remat=True)},
    )
