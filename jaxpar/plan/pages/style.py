"""Letters and colours of causes: the model's are here, each technique has its own."""

from jaxpar.html.markup import Markup
from jaxpar.plan.causes import PALE, Style
from jaxpar.plan.techniques.table import TECHNIQUES

_ON_DARK = f"light-dark({PALE}, #10151b)"
SECONDS = {  # colours of the causes of time: computation is blue
    "matmuls": Style(letter="M", shade=25, ink=231, light="#1f4e79", dark="#4f93d6", text=_ON_DARK),
    "attention": Style(letter="A", shade=74, light="#3f87bd", dark="#86bde8", text=_ON_DARK),
    "elementwise": Style(letter="E", shade=153, light="#a9cfea", dark="#c4e0f5"),
    "recompute": Style(letter="R", shade=140, light="#7264ad", dark="#a698e2", text=_ON_DARK),
    "stragglers": Style(letter="W", shade=244, light="#c9ced6", dark="#8b93a0"),
    "host": Style(letter="H", shade=137, light="#a17a4c", dark="#c9a679"),
    "optimizer": Style(letter="O", shade=78, light="#2f8f6b", dark="#58c79d"),
}
# causes of a model's memory, to the classes of the inspector's page
BYTES = {"parameters": 0, "gradients": 5, "optimizer": 1, "state": 2, "activations": 7, "logits": 8, "working": 6}


def styles() -> dict[str, Style]:
    """Maps the causes of time, and the causes of bytes of techniques, to letters and colours."""
    return SECONDS | {cause: look for technique in TECHNIQUES.values() for cause, look in technique.styles.items()}


def css() -> Markup:
    """Returns CSS classes with these colours: `jx-t-` and the cause."""
    rows = (
        f"  .jx-t-{cause} {{ --c: light-dark({look.light}, {look.dark}); --on: {look.text}; }}\n"
        for cause, look in styles().items()
    )
    return Markup("\n" + "".join(rows))


def seconds_class(cause: str) -> str:
    """Returns the CSS class of a cause of seconds."""
    return f"jx-t-{cause}"


def bytes_class(cause: str) -> str:
    """Returns the CSS class of a cause of bytes: the inspector's, or a technique's."""
    return f"jx-c{BYTES[cause]}" if cause in BYTES else seconds_class(cause)
