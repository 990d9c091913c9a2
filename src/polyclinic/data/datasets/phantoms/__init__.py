"""Phantoms: images drawn by a program, with anatomy and disease that a network must learn, of nobody.

One file a phantom, all drawn with `canvas` and collected by `phantom`; they may import `errors`, `settings`,
`randomness` and `data`.
"""
