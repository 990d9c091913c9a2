"""The nearest vector of a codebook, on a GPU. Whoever imports this file needs Triton.

Names in capitals are known when a program is compiled.
"""
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: rows and vectors that a program compares at a time
ROWS, VECTORS = 64, 64


@triton.jit
def _nearest(
    rows, vectors, sizes, codes, count,
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """|z - e|^2 less |z|^2, in fp32; the first of vectors that are equally near."""
    r, d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    latents = tl.load(rows + r[:, None] * D + d[None, :], mask=(r < count)[:, None], other=0.0)
    best = tl.full((R,), float("inf"), tl.float32)
    found = tl.zeros((R,), tl.int32)
    for start in range(0, K, V):
        k = start + tl.arange(0, V)
        known = tl.load(vectors + k[None, :] * D + d[:, None], mask=(k < K)[None, :], other=0.0)
        size = tl.load(sizes + k, mask=k < K, other=float("inf"))
        away = size[None, :] - 2.0 * tl.dot(latents, known, input_precision="ieee")
        least, place = tl.min(away, 1, return_indices=True)
        found = tl.where(least < best, start + place, found)
        best = tl.minimum(least, best)
    tl.store(codes + r, found.to(tl.int64), mask=r < count)


def nearest(rows: Tensor, vectors: Tensor, sizes: Tensor) -> Tensor:
    """The index int64 [n] of the nearest of `vectors` [K, D], whose squared lengths are `sizes` [K], to rows [n, D]."""
    codes = torch.empty(len(rows), dtype=torch.long, device=rows.device)
    grid = (triton.cdiv(len(rows), ROWS),)
    _nearest[grid](rows, vectors, sizes, codes, len(rows), len(vectors), vectors.shape[1], ROWS, VECTORS)
    return codes
