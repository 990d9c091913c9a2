"""Preprocessing: crop, resize and the papers' own steps, to uint8 arrays at the study's size.

These files may import NumPy, SciPy and Pillow, `data.cache` and `data.listing`; they know no source by name.
"""
