"""The self-check of a wrapped model: on a small random graph, whole and in pieces, before it runs on the real one."""
