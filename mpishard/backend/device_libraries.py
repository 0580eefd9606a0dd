"""The libraries for GPUs that are installed as packages."""

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
    """Versions of the libraries for GPUs that mpishard can use, besides those of a CUDA toolkit; nothing is imported.

    Attention by cuDNN needs ``"cuDNN frontend"``, and cuDNN from a package or elsewhere; products need cuBLAS, from a
    package or a CUDA toolkit, and those with bias and GELU also ``"nvmath"``.
    """
    return installed(_PACKAGES)
