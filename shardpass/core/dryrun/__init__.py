"""A dry run: the real engine and the real model on one made-up, smaller rank, to see what memory they need."""
