"""Parameters as named views into one flat buffer, their gradients in buckets, and their shares under ZeRO-3.

Input: tensors by name, and gradients as layers write them.
Output: one flat buffer with a view for each tensor, and buckets of gradients, handed to the sums over ranks as they
become full.

Read ``flat`` first, with ``tensor_layout``, then ``buckets``, ``progress`` and ``reducer``: a gradient from the
backward pass to its sum; ``zero3_units`` for parameters that are divided.
"""
