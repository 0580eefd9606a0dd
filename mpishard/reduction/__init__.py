"""Sums of gradients over an axis: in a fixed order, compressed, by low-rank approximations, by nodes."""
