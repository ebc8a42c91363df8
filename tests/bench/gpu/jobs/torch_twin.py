"""The same decoder in PyTorch with torch.compile, as a process of its own: prints one line of JSON.

Its own choices: fused q/k/v and gate/up, flash attention, autocast to bfloat16 over float32 parameters, fused AdamW
after clipping.
Takes the fields of a `Training` as JSON; imports nothing of jaxpar.
"""

import importlib
import json
import sys
import time
from typing import Any

WARM, STEPS = 3, 20


def build(torch: Any, job: dict[str, Any]) -> Any:
    """Returns the decoder as a module."""
    nn, functional = torch.nn, torch.nn.functional
    dim, heads = job["dim"], job["heads"]

    def rotary(x):  # [batch, heads, seq, head_dim]
        half = x.shape[-1] // 2
        frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_attention, self.norm_mlp = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
            self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
            self.gate_up = nn.Linear(dim, 2 * job["hidden"], bias=False)
            self.down = nn.Linear(job["hidden"], dim, bias=False)

        def forward(self, x):
            batch, seq, _ = x.shape
            split = self.qkv(self.norm_attention(x)).view(batch, seq, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
            q, k, v = split.unbind(0)
            y = functional.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, seq, dim))
            gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
            return x + self.down(functional.silu(gate) * up)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(job["vocab"], dim)
            self.blocks = nn.ModuleList(Block() for _ in range(job["layers"]))
            self.norm, self.head = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, job["vocab"], bias=False)

        def forward(self, tokens, targets):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x)).float()
            return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

    return Decoder()


def run(job: dict[str, Any], device: str) -> dict[str, Any]:
    """Returns the seconds of a step, and of compiling it."""
    torch = importlib.import_module("torch")
    torch.set_float32_matmul_precision("high")
    model = build(torch, job).to(device)
    cuda = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    compiled = torch.compile(model) if cuda else model
    tokens = torch.randint(job["vocab"], (job["batch"], job["seq"] + 1), device=device)
    wait = torch.cuda.synchronize if cuda else lambda: None

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    for _ in range(WARM):
        step()
    wait()
    warm, begin = time.perf_counter() - begin, time.perf_counter()
    for _ in range(STEPS):  # the host runs ahead, as in training
        step()
    wait()
    seconds = (time.perf_counter() - begin) / STEPS
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {"torch_seconds": seconds, "warm_seconds": warm, "torch_peak_bytes": peak,
            "torch": torch.__version__}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]), sys.argv[2])))
