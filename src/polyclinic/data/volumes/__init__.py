"""Volumes: cases of several channels and structures, with their own shapes, spacings and affines.

They stand on MONAI, and may import `errors`, `settings`, `randomness`, `files` and `data`.
"""
