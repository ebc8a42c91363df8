"""pipelined."""
