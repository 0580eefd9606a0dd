"""Compressors: the bytes that are sent for gradients, and the errors that remain.  No MPI.

Input: blocks of gradients in float32 or float64.
Output: the bytes to send, and what they leave out, which the caller adds to the next gradient.

Read ``compressor`` first, the interface; then ``compressors``, and their loops on the host in ``kernels``.
"""

from mpishard.compression.compressor import Compressor, PieceCompressor
from mpishard.compression.compressors import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    PowerSGDCompressor,
    SignCompressor,
    TopKCompressor,
)

__all__ = [
    "BFloat16Compressor",
    "Compressor",
    "Float16Compressor",
    "Int8Compressor",
    "PieceCompressor",
    "PowerSGDCompressor",
    "SignCompressor",
    "TopKCompressor",
]
