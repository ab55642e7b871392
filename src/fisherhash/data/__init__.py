"""Images and labels: where they come from, how they are split, decoded and checked."""

from fisherhash.data.loading import (
    DecodedBlock,
    Skipped,
    UnreadableImage,
    decode,
    load_image,
    write_skipped,
)
from fisherhash.data.protocols import PROTOCOLS, Protocol, Split, resolve
from fisherhash.data.sources import Collection, Reader, open_data, open_paths
from fisherhash.system.cache import cache_dir

__all__ = [
    "PROTOCOLS",
    "Collection",
    "DecodedBlock",
    "Protocol",
    "Reader",
    "Skipped",
    "Split",
    "UnreadableImage",
    "cache_dir",
    "decode",
    "load_image",
    "open_data",
    "open_paths",
    "resolve",
    "write_skipped",
]
