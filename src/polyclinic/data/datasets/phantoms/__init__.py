"""Phantoms: images drawn by a program, with anatomy and disease that a network must learn, of nobody.

One file a phantom, all drawn on the canvas of `phantom`; they may import `errors`, `settings`, `randomness` and `data`.
"""
