"""The stages of `jaxpar bench gpu`, one in each file; `jaxpar.bench.gpu.table` lists them."""
