"""The engine: full-graph training on sharded graphs. Each folder is a room, and `docs/design.md` is a tour of them.

The engine knows torch and the `Communicator` protocol. It knows neither PyG, DGL nor a concrete backend.
"""
