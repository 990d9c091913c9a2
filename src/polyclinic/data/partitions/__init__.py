"""How images are spread over sites: one file a partition, listed in `data/partition.py`.

They read a `Dataset` and give indices; they may import `errors`, `settings`, `randomness` and what lies
beside them in `data`, never a source.
"""
