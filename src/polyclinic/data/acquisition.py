"""Acquisition shift between sites: contrast, colour, blur, noise, vignette and crop of each site's camera."""

from dataclasses import dataclass

import numpy as np
import scipy  # its parts are imported when they are named: some take seconds

from polyclinic.data.pixels import to_uint8
from polyclinic.randomness import numpy_rng

CHUNK = 256  # images in float at a time


@dataclass(frozen=True)
class Style:
    """The image style of one camera. The defaults change nothing.

    gamma     exponent of the tone curve; below 1 brightens
    contrast  factor about mid-grey
    colour    factor per channel (red, green, blue); a grey image takes their mean
    blur      standard deviation of a Gaussian, as a share of the image's side
    noise     standard deviation of the sensor's noise, of intensities in [0, 1]
    vignette  how much darker the corners are, 0 to 1
    crop      share of the side that is kept, at most 1
    """

    gamma: float = 1.0
    contrast: float = 1.0
    colour: tuple[float, float, float] = (1.0, 1.0, 1.0)
    blur: float = 0.0
    noise: float = 0.0
    vignette: float = 0.0
    crop: float = 1.0


def draw_style(rng: np.random.Generator, strength: float) -> Style:
    """A camera at random; `strength` 0 gives one that changes nothing, 1 clearly different ones."""
    signed, positive = rng.uniform(-1, 1, 5) * strength, rng.uniform(0, 1, 4) * strength
    return Style(
        gamma=float(np.exp(0.45 * signed[0])),
        contrast=float(np.exp(0.35 * signed[1])),
        colour=(float(np.exp(0.22 * signed[2])), float(np.exp(0.22 * signed[3])), float(np.exp(0.22 * signed[4]))),
        blur=float(0.015 * positive[0]),
        noise=float(0.06 * positive[1]),
        vignette=float(0.6 * positive[2]),
        crop=float(1 - 0.2 * positive[3]),
    )


def acquire(images: np.ndarray, style: Style, rng: np.random.Generator) -> np.ndarray:
    """uint8 [N, C, H, W] as a camera of that style would have taken them; `rng` draws its noise."""
    out = np.empty(images.shape, dtype=np.uint8)
    for start in range(0, len(images), CHUNK):
        part = slice(start, start + CHUNK)
        out[part] = _acquire_chunk(np.asarray(images[part]), style, rng)
    return out


def _acquire_chunk(images: np.ndarray, style: Style, rng: np.random.Generator) -> np.ndarray:
    side = images.shape[-1]
    light = zoom_centre(images, style.crop, order=1).astype(np.float32) / 255
    light = (light**style.gamma - 0.5) * style.contrast + 0.5
    colour = np.array(style.colour) if images.shape[1] == 3 else np.full(images.shape[1], np.mean(style.colour))
    light *= colour.astype(np.float32)[:, None, None] * _vignette(side, style.vignette)
    if style.blur * side > 0.1:
        for axis in (2, 3):
            light = scipy.ndimage.gaussian_filter1d(light, style.blur * side, axis=axis)
    light += style.noise * rng.standard_normal(light.shape, dtype=np.float32)
    return to_uint8(light)


def _vignette(side: int, strength: float) -> np.ndarray:
    """Factor per pixel, float32 [side, side]: 1 in the middle, 1 - strength in the corners."""
    at = (np.arange(side, dtype=np.float32) + 0.5) / side * 2 - 1
    return 1 - strength * (at[:, None] ** 2 + at[None, :] ** 2) / 2


def zoom_centre(images: np.ndarray, keep: float, *, order: int) -> np.ndarray:
    """The central share `keep` of each side, enlarged to the full size; order 1 for images, 0 for masks.

    images: [..., H, W]
    """
    if keep >= 1:
        return images
    height, width = images.shape[-2:]
    rows, columns = ((np.arange(n) - (n - 1) / 2) * keep + (n - 1) / 2 for n in (height, width))
    where = np.stack(np.meshgrid(rows, columns, indexing="ij"))
    flat = images.reshape(-1, height, width)
    out = np.stack([scipy.ndimage.map_coordinates(image, where, order=order, mode="nearest") for image in flat])
    return out.reshape(images.shape)


def apply_styles(images: np.ndarray, address: tuple[str | int, ...], strength: float, *, split: str = "") -> np.ndarray:
    """uint8 [N, C, H, W] through one site's camera. `address` names the site, e.g. (seed, "style", "site-1").

    The camera is the same for every split of the site; `split` only gives each its own noise. Masks go
    through `crop_masks` with the same address and strength.
    """
    if strength == 0:
        return images
    return acquire(images, draw_style(numpy_rng(*address), strength), numpy_rng(*address, "noise", split))


def crop_masks(masks: np.ndarray, address: tuple[str | int, ...], strength: float) -> np.ndarray:
    """uint8 [N, H, W] masks, cropped as `apply_styles` crops their images."""
    return zoom_centre(masks, draw_style(numpy_rng(*address), strength).crop, order=0)
