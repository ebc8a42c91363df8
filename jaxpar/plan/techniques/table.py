"""The techniques that share a block between devices, by their cause."""

from jaxpar.plan.techniques.base import Technique
from jaxpar.plan.techniques.context import CONTEXT
from jaxpar.plan.techniques.tensor import TENSOR

TECHNIQUES: dict[str, Technique] = {"tensor": TENSOR, "context": CONTEXT}
