"""HDF5 file images with a seal in their user block, which HDF5 readers ignore.

The first 512 bytes have a mark, the length of the image and the SHA-256 of all other bytes of the image.  They are
checked before HDF5 opens it, since a corrupt file can hang or crash the HDF5 library.  Nothing here is collective.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

USER_BLOCK = 512


@dataclass(frozen=True)
class FileImage:
    """A kind of file image.

    Parameters
    ----------
    mark : bytes
        The first bytes of each image.
    version : int
        Of its content.
    what : str
        What it has, for messages, such as ``"optimizer state"``.
    """

    mark: bytes
    version: int
    what: str

    @property
    def _header(self) -> struct.Struct:
        return struct.Struct(f"<{len(self.mark)}sIQ")

    @property
    def _place(self) -> slice:
        """Where the SHA-256 is."""
        return slice(self._header.size, self._header.size + 32)

    def seal(self, image: bytes) -> bytes:
        """An image with its seal.

        Parameters
        ----------
        image : bytes
            With a user block of `USER_BLOCK` bytes.

        Returns
        -------
        bytes
            A copy.
        """
        sealed = bytearray(image)
        self._header.pack_into(sealed, 0, self.mark, self.version, len(sealed))
        sealed[self._place] = self._digest(sealed)
        return bytes(sealed)

    def digest(self, data: bytes) -> bytes:
        """The SHA-256 that a sealed image has of its other bytes.

        Parameters
        ----------
        data : bytes
            From `seal`.

        Returns
        -------
        bytes
            32 bytes.
        """
        return bytes(data[self._place])

    def check(self, data: bytes) -> None:
        """Raise unless bytes are a whole image of this kind.

        Parameters
        ----------
        data : bytes
            From anywhere.

        Raises
        ------
        TypeError
            If `data` is not bytes.
        ValueError
            If they are something else, or are truncated, altered or of another version.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"deserialize takes the bytes that serialize returned, got {type(data).__name__}")
        if len(data) < USER_BLOCK or bytes(data[: len(self.mark)]) != self.mark:
            raise ValueError(f"these {len(data)} bytes are no {self.what} of mpishard (no mark at their start)")
        _, version, length = self._header.unpack_from(data)
        if version != self.version:
            raise ValueError(f"{self.what} of version {version}; this mpishard reads version {self.version}")
        if len(data) != length:
            raise ValueError(f"{self.what} is cut short or padded: {len(data)} bytes, but it was written with {length}")
        if self._digest(data) != self.digest(data):
            raise ValueError(f"{self.what} is damaged: its SHA-256 differs from the one written with it")

    def _digest(self, image: bytes | bytearray | memoryview) -> bytes:
        view = memoryview(image)
        hasher = hashlib.sha256(view[: self._place.start])
        hasher.update(view[self._place.stop :])
        return hasher.digest()
