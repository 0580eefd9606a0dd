"""Sums of gradients over an axis: in a fixed order, compressed, by low-rank approximations, by nodes.

Input: a bucket of gradients of each rank.
Output: the sum, on all ranks or on the owners of its parts.

Read ``tree_sum`` and ``ordered`` first, the sums with the same bits on any ranks; then ``hierarchical`` and
``compressed``.
"""
