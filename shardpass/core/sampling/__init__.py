"""Neighbour sampling over a sharded graph: seeds, neighbours, features. Knows torch and the Communicator only."""
