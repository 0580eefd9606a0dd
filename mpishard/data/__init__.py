"""Which samples a rank reads, and data to read: text that is there, and tokens from files of any size."""

from mpishard.data.megatron_files import MegatronFile
from mpishard.data.mixture import Mixture
from mpishard.data.read_ahead import ReadAhead
from mpishard.data.token_arrays import HDF5Tokens, TextFile, ZarrTokens
from mpishard.data.token_data import TokenData
from mpishard.data.token_files import TokenFile

__all__ = ["HDF5Tokens", "MegatronFile", "Mixture", "ReadAhead", "TextFile", "TokenData", "TokenFile", "ZarrTokens"]
