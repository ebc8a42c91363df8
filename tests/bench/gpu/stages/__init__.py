"""The stages of `python -m tests.bench.gpu`, one in each file; `jaxpar.bench.gpu.table` lists them."""
