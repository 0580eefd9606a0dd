"""Optimizers that distribute an update rule over the data axis: DDP, ZeRO, local SGD."""
