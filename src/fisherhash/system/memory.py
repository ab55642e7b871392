"""How much memory this process may still use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say."""
    found = [limit for limit in (_of_system(), _of_container()) if limit is not None]
    if found:
        return min(found)
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _of_system(path: Path = Path("/proc/meminfo")) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _of_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves; file pages count as free, because they are given back."""
    with contextlib.suppress(OSError, ValueError):
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        pages = dict(line.split() for line in lines)
        return max(0, int(limit) - used + int(pages.get("inactive_file", 0)))
    return None
