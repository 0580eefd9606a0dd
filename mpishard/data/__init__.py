"""The samples that a rank reads, and data to read: text that every Python has, and tokens from files of any size."""

from mpishard.data.read_ahead import ReadAhead
from mpishard.data.token_data import Mixture, TokenData
from mpishard.data.token_files import HDF5Tokens, MegatronFile, TextFile, TokenFile, ZarrTokens

__all__ = ["HDF5Tokens", "MegatronFile", "Mixture", "ReadAhead", "TextFile", "TokenData", "TokenFile", "ZarrTokens"]
