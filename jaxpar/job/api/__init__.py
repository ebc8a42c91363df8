"""Commands as Python functions: `jp.plan`, which also plans a step, and `chat`, the chat of `jaxpar sample`."""
