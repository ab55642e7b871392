"""Images and labels: where they come from, how they are split, decoded and checked."""

from fisherhash.data.collection import Collection, Reader
from fisherhash.data.images import UnreadableImage
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data, open_paths
from fisherhash.data.splits import Split

__all__ = ["Collection", "Reader", "Split", "UnreadableImage", "open_data", "open_paths", "resolve"]
