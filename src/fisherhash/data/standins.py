"""The stand-ins tiny100 and coco21: the package holds their file lists, not the images."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from pathlib import Path

from fisherhash.data.lists import read_lines
from fisherhash.errors import UsageError, unknown_name
from fisherhash.system.storage import write_files

_PACKED = Path(__file__).parent / "standins.json.xz"


def write_lists(name: str, dest: str | os.PathLike[str]) -> Path:
    """Write the four list files of ``tiny100`` or ``coco21`` into ``dest``, a folder."""
    packed = json.loads(lzma.decompress(_PACKED.read_bytes()))
    if name not in packed:
        raise unknown_name("stand-in", name, packed)
    folder = Path(dest)
    write_files(folder, packed[name])
    return folder


def build_tiny100(tiny_imagenet: str | os.PathLike[str], dest: str | os.PathLike[str]) -> Path:
    """Build ``dest`` from an unpacked ``tiny-imagenet-200``: lists and 35,000 copied images."""
    source = Path(tiny_imagenet)
    if not (source / "train").is_dir() or not (source / "val" / "images").is_dir():
        raise UsageError(
            f"{source} is not Tiny-ImageNet: it has no train and val/images; unpack "
            "tiny-imagenet-200.zip and give its folder"
        )
    folder = write_lists("tiny100", dest)
    files = (folder / file for file in ("database.txt", "query.txt"))
    listed = dict.fromkeys(line for file in files for line in read_lines(file))
    for name in filter(None, listed):
        label, file = name.split("/")
        held_out = file.startswith("val_")
        original = source / "val/images" if held_out else source / "train" / label / "images"
        (folder / label).mkdir(exist_ok=True)
        try:
            shutil.copyfile(original / file, folder / name)
        except FileNotFoundError:
            raise UsageError(f"{original / file} is missing; unpack the archive again") from None
    return folder
