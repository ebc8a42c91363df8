"""Gradients of a step whose layers are spread over `pipe`, with synchronous or asynchronous updates."""
