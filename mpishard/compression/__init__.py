"""Compressors: the bytes that are sent for gradients, and the errors that remain.  No MPI."""

from mpishard.compression.casts import BFloat16Compressor, Float16Compressor
from mpishard.compression.compressor import Compressor, PieceCompressor
from mpishard.compression.power_sgd import PowerSGDCompressor
from mpishard.compression.quantized import Int8Compressor, SignCompressor
from mpishard.compression.top_k import TopKCompressor

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
