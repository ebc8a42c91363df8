"""Data parallelism: replicas of the parameters, each with other examples."""

from jaxpar.parallel.techniques.base import Technique

DATA = Technique(axis="data")
