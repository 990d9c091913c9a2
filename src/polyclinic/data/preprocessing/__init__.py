"""From pixels as they come to uint8 arrays at the study's size: fitting, the papers' own steps, writing.

These files may import NumPy, SciPy and Pillow, `data.cache` and `data.listing`; they know no source by name.
"""
