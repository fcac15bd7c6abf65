"""`shardpass test`: every rank is seen, what travels between ranks is measured, and a small model is exact."""
