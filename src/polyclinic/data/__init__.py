"""Data: sources of images, preparation, splits and partitions into memory-mapped files for each site.

Sources (`datasets/`), preparation (`listing`, `fit`), splits, partitions and their measured heterogeneity
live here; they may import `errors`, `settings` and `randomness`, never tasks, methods or engines.
"""
