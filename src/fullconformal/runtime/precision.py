"""The precision in which torch forms products, asked for explicitly where scores depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32, which torch allows in convolutions, and in products if asked to: scores are compared more finely than its three digits."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32
    cudnn.allow_tf32 = products.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, products.allow_tf32 = before


@contextmanager
def tensor_cores() -> Iterator[None]:
    """TF32 in float32 products on a GPU, for sums of squares only: BᵀB, and second moments.

    Entries of B are rounded by ε ≤ 2⁻¹¹ of themselves and summed in float32: the sum is B̃ᵀB̃, still positive semi-definite, and
    xᵀB̃ᵀB̃x = |Bx + e|² with |e|² ≈ ε² Σ_j x_j² (BᵀB)_jj / 3. The change is small against |Bx|², or else like a damping of 8e-8 times the
    diagonal: what float32 itself costs. It would not be so for products that are no squares.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def whole_sums() -> Iterator[None]:
    """Products in half precision are added up in float32 throughout, which torch does not insist on by default."""
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before


def single_is_whole() -> bool:
    """Whether products of float32 on a CPU are formed in float32: torch may have been asked for less, which some CPUs have units for."""
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision in ("ieee", "none")
