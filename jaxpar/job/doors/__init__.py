"""What the verbs of a job do, in Python: `jp.plan` is `jaxpar plan`, also of a step; `chat` is `jaxpar sample`'s."""
