"""Which libraries for GPUs are installed as packages."""

from __future__ import annotations

from mpishard.version import installed

_PACKAGES = {
    "cuBLAS": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuDNN frontend": ("nvidia-cudnn-frontend",),
    "nvmath": ("nvmath-python",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}


def device_libraries() -> dict[str, str]:
    """Libraries for GPUs that mpishard can use, besides those of a CUDA toolkit; nothing is imported.

    Not collective.

    Returns
    -------
    dict
        By library its version.  Attention by cuDNN needs ``"cuDNN frontend"``, and cuDNN from a package or elsewhere;
        products need cuBLAS, from a package or a CUDA toolkit, and those with bias and GELU ``"nvmath"`` besides.
    """
    return installed(_PACKAGES)
