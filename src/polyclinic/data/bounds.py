"""Bounds on what files may hold, checked by the sizes they declare and before anything is decoded: a few kilobytes can
declare an image of gigabytes."""

from __future__ import annotations

#: pixels of one image, or of one slice of a volume: 8192 x 8192
MOST_PIXELS = 2**26
#: a volume may have so many times the pixels of the largest image
VOLUME = 8


def check_pixels(width: int, height: int, most: int, slices: int = 1) -> None:
    """ValueError for an image that declares more pixels than the study allows, or a volume eight times as many."""
    pixels = width * height
    if pixels > most:
        raise ValueError(f"the image has {width} x {height} pixels, above the limit of {most}; raise data.max_pixels")
    if pixels * slices > VOLUME * most:
        raise ValueError(
            f"the volume has {width} x {height} x {slices} voxels, above the limit of {VOLUME} x {most}; "
            "raise data.max_pixels"
        )
