"""Data parallelism: replicas of the parameters, each with other rows.

What their all-reduce costs is one sum with that of `fsdp`, for both hide behind the same computation: `sharding.py`.
"""

from jaxpar.plan.techniques.base import Technique

DATA = Technique(axis="data", complexity=1.0)
