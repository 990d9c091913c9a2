"""Images, from wherever they are to memory-mapped parts that each site opens alone.

Sources (`datasets/`), preparation (`preprocessing/`), splits, partitions and their measured heterogeneity
live here; they may import `errors`, `settings` and `randomness`, never tasks, methods or engines.
"""
