"""Optimizers that spread the work of an update rule over the data axis: DDP, ZeRO, local SGD."""
