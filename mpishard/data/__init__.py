"""The samples that a rank reads, and data to read: text that every Python has, and tokens from files of any size.

Input: text, files of tokens, a seed and the number of a step.
Output: the samples of that step which a rank computes, the same on any number of ranks in total, as arrays of token
ids.

Read ``sampling`` first: who computes which sample; then ``token_files``, ``token_data`` and ``text``: where samples
come from; ``evaluation`` last.
"""

from mpishard.data.sampling import ReadAhead
from mpishard.data.token_data import Mixture, TokenData
from mpishard.data.token_files import HDF5Tokens, MegatronFile, TextFile, TokenFile, ZarrTokens

__all__ = ["HDF5Tokens", "MegatronFile", "Mixture", "ReadAhead", "TextFile", "TokenData", "TokenFile", "ZarrTokens"]
