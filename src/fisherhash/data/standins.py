"""The stand-ins tiny100 and coco21: the package holds their file lists, not the images."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from pathlib import Path

from fisherhash.errors import UsageError, unknown_name
from fisherhash.system.storage import write_file, write_files

LIST_NAMES = ("train.txt", "query.txt", "database.txt", "classes.txt")
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
    listed = {
        line: None
        for file in ("database.txt", "query.txt")
        for line in (folder / file).read_text(encoding="utf-8").split("\n")
        if line
    }
    for name in listed:
        label, file = name.split("/")
        held_out = file.startswith("val_")
        original = source / "val/images" if held_out else source / "train" / label / "images"
        (folder / label).mkdir(exist_ok=True)
        try:
            shutil.copyfile(original / file, folder / name)
        except FileNotFoundError:
            raise UsageError(f"{original / file} is missing; unpack the archive again") from None
    return folder


def pack_lists(folders: dict[str, str | os.PathLike[str]], dest: str | os.PathLike[str]) -> None:
    """Pack the list files of several folders into one file, as in the package."""
    texts = {
        name: {file: (Path(folder) / file).read_text(encoding="utf-8") for file in LIST_NAMES}
        for name, folder in folders.items()
    }
    data = json.dumps(texts, ensure_ascii=False, sort_keys=True).encode()
    write_file(dest, lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
