"""jaxpar beside PyTorch's FSDP2: the same decoder and batch, state sharded over two processes on processors.

    settings.toml   what both sides are given
    turns           what a process of either side does: steps when it is told to, and says what they cost
    jaxpar_side     one of two processes of jaxpar
    torch_side      one of two processes of PyTorch: fully_shard, torch.compile, gloo; an interpreter with torch runs it
    pairs           starts all four, gives them turns, and compares

Both sides keep what they like best between passes: each is run with remat and without, and the better one counts.
"""
