"""From the pixels as a file stores them to RGB in the colours of sRGB.

Transparency is laid on white. Colours with a profile (Display P3, Adobe RGB, CMYK) are converted
to sRGB; a broken profile is ignored, and so is one that says sRGB in other words.
"""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image, ImageChops

_SAME = 3
"""Levels of 255 by which a profile may move a colour and still count as sRGB."""

_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
_WHITE_IS_ZERO = 0


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a loaded image to 8-bit RGB."""
    profile = image.info.get("icc_profile")
    if image.mode == "RGB" and "transparency" not in image.info:
        return _in_srgb(image, profile)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _deep_grey(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        if profile:
            colours = _in_srgb(rgba.convert("RGB"), profile)
            colours.putalpha(rgba.getchannel("A"))
            rgba = colours
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "CMYK":
        return _from_cmyk(image, profile)
    if image.mode in ("1", "L"):
        return image.convert("RGB")
    return _in_srgb(image.convert("RGB"), profile)


def _from_cmyk(image: Image.Image, profile: bytes | None) -> Image.Image:
    if image.format == "JPEG" and "adobe" not in image.info:
        # Pillow takes every CMYK JPEG for one of Adobe's, whose values are inverted.
        image = ImageChops.invert(image)
    transform = _transform(profile, "CMYK") if profile else None
    return image.convert("RGB") if transform is None else _apply(image, transform)


def _in_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    transform = _transform(profile, "RGB") if profile else None
    return image if transform is None else _apply(image, transform)


def _apply(image: Image.Image, transform: object) -> Image.Image:
    from PIL import ImageCms

    try:
        changed = ImageCms.applyTransform(image, transform)  # type: ignore[arg-type]
    except (ImageCms.PyCMSError, ValueError, OSError):
        changed = None
    return image.convert("RGB") if changed is None else changed


@functools.lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> object | None:
    """The conversion of a profile to sRGB; None if it is broken or changes next to nothing."""
    try:
        from PIL import ImageCms

        given = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space: str = given.profile.xcolor_space  # type: ignore[union-attr]
        if space.strip() != mode:
            return None
        transform = ImageCms.buildTransform(
            given,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        if mode == "RGB":
            # The many profiles that all mean sRGB differ in a level here and there. Images with
            # one of them keep the pixels that they have.
            steps = np.linspace(0, 255, 9).round().astype(np.uint8)
            cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(27, 27, 3)
            changed = np.asarray(ImageCms.applyTransform(Image.fromarray(cube), transform))
            if np.abs(changed.astype(int) - cube).max() <= _SAME:
                return None
        return transform
    except Exception:
        # Whatever is wrong with a profile, the pixels can be shown without it.
        return None


def _deep_grey(image: Image.Image) -> Image.Image:
    """Scale greys of more than 8 bits: by the bits they have, or else by the range they use."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    top = float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        tags = getattr(image, "tag_v2", {})
        depth = tags.get(_BITS_PER_SAMPLE, (16,))[0]
        most = 2.0**depth - 1 if depth in (10, 12, 14) else 65_535.0
        scaled = np.minimum(values / (most / 255), 255)
        if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            scaled = 255 - scaled
    elif values.min() < 0 or top > 65_535:
        low = float(values.min())
        scaled = (values - low) * (255 / max(top - low, 1e-12))
    elif image.mode == "F" and top <= 1:
        scaled = values * 255
    else:
        scaled = values / 257 if top > 255 else values
    return Image.fromarray(np.rint(scaled).astype(np.uint8)).convert("RGB")
