"""The stages of `python -m tests.bench.gpu`, one in each file; `bench.gpu.table` lists them."""
