"""Compressors: the bytes that are sent for gradients, and the errors that remain.  No MPI."""

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
