"""Which samples a rank reads, and data to read."""
