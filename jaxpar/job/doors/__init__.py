"""What the verbs of a job do, in Python: `jp.plan` is `jaxpar plan`, `chat` is `jaxpar sample RUN --chat`."""
