"""Phantoms: images drawn by a program, with anatomy and disease a network must learn and nobody's privacy at stake.

One file a phantom, all drawn with `canvas` and collected by `phantom`; they may import `errors`, `settings`,
`randomness` and `data`.
"""
