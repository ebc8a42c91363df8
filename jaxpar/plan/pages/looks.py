"""How causes are drawn: those of the model are here, and each technique brings its own."""

from jaxpar.html.markup import Markup
from jaxpar.plan.causes import PALE, Look
from jaxpar.plan.techniques.table import TECHNIQUES

_ON_DARK = f"light-dark({PALE}, #10151b)"
SECONDS = {  # of what a model computes: work is blue
    "matmuls": Look(letter="M", shade=25, ink=231, light="#1f4e79", dark="#4f93d6", on=_ON_DARK),
    "attention": Look(letter="A", shade=74, light="#3f87bd", dark="#86bde8", on=_ON_DARK),
    "elementwise": Look(letter="E", shade=153, light="#a9cfea", dark="#c4e0f5"),
    "recompute": Look(letter="R", shade=140, light="#7264ad", dark="#a698e2", on=_ON_DARK),
    "stragglers": Look(letter="W", shade=244, light="#c9ced6", dark="#8b93a0"),
    "host": Look(letter="H", shade=137, light="#a17a4c", dark="#c9a679"),
    "optimizer": Look(letter="O", shade=78, light="#2f8f6b", dark="#58c79d"),
}
# causes of memory that a model has: the classes that the inspector's page gives them
BYTES = {"parameters": 0, "gradients": 5, "optimizer": 1, "state": 2, "activations": 7, "logits": 8, "working": 6}


def looks() -> dict[str, Look]:
    """Returns cause of seconds, or of a technique's bytes, to how it is drawn."""
    return SECONDS | {cause: look for each in TECHNIQUES.values() for cause, look in each.looks.items()}


def css() -> Markup:
    """Returns the colours of these causes as classes, jx-t- and the cause."""
    rows = (
        f"  .jx-t-{cause} {{ --c: light-dark({look.light}, {look.dark}); --on: {look.on}; }}\n"
        for cause, look in looks().items()
    )
    return Markup("\n" + "".join(rows))


def of_seconds(cause: str) -> str:
    """Returns the class of a cause of seconds."""
    return f"jx-t-{cause}"


def of_bytes(cause: str) -> str:
    """Returns the class of a cause of bytes: the inspector's, or that of a technique."""
    return f"jx-c{BYTES[cause]}" if cause in BYTES else of_seconds(cause)
