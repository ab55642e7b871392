"""Images behind URLs: listing them, and reading them by number."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fisherhash.data.folders import FoundImages, ImageFile, walk_images
from fisherhash.data.formats import UnreadableImage, is_image_name
from fisherhash.data.images import current_limits, read_file
from fisherhash.data.readers import FileReader
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.remote import file_system, is_url

_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")


class RemoteReader(FileReader):
    """Image files behind URLs, or on the disk."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__("", paths)

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        where = self.names[index]
        if not is_url(where):
            return read_file(where)
        limit = current_limits().bytes
        fs, path = file_system(where)
        try:
            with fs.open(path, "rb") as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            raise UnreadableImage("it is gone", passing=True) from None
        except Exception as error:  # every file system has errors of its own
            raise UnreadableImage(f"cannot be read: {error}", passing=True) from None
        if len(data) > limit:
            raise UnreadableImage(f"is larger than {limit:,} bytes")
        return data

    def fingerprint(self) -> str:
        """Return a checksum over the names."""
        return hashlib.sha256("\0".join(self.names).encode(errors="surrogateescape")).hexdigest()


def list_images(source: str) -> FoundImages:
    """The images of a folder, behind a URL, or in a list: a text file with one of both per line.

    The key of an image is its path inside the folder or behind the URL; in a list, its line.

    Raises:
        UsageError: there is no such thing.
    """
    if is_url(source) and not source.endswith(".txt"):
        return _list_url(source)
    if not is_url(source) and Path(source).is_dir():
        return walk_images(Path(source))
    return _list_lines(source, _lines(source))


def _lines(source: str) -> list[str]:
    try:
        if is_url(source):
            fs, path = file_system(source)
            text = fs.cat_file(path).decode(errors="surrogateescape")
        else:
            text = os.fsdecode(Path(source).read_bytes())
    except OSError as error:
        raise UsageError(
            f"{source} is neither a folder of images nor a list of them: {error}"
        ) from None
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def _list_lines(source: str, lines: Iterable[str]) -> FoundImages:
    found = FoundImages()
    for line in lines:
        try:
            if is_url(line):
                fs, path = file_system(line)
                found.files.append(_file(line, line, fs.info(path)))
            else:
                path = os.path.join(os.path.dirname(os.path.abspath(source)), line)
                found.files.append(ImageFile.from_state(line, path, os.stat(path)))
        except OSError as error:
            found.broken[line] = f"cannot be read: {error.strerror or error}"
    return found


def _list_url(url: str) -> FoundImages:
    fs, root = file_system(url)
    found = FoundImages()
    try:
        if not fs.exists(root):
            raise UsageError(f"{url} does not exist")
        listed: Mapping[str, Any] = fs.find(root, detail=True)
    except FisherhashError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise FisherhashError(f"{url} cannot be listed: {error}") from error
    for name, about in sorted(listed.items()):
        key = name[len(root) :].lstrip("/") or os.path.basename(name)
        if is_image_name(key):
            found.files.append(_file(key, fs.unstrip_protocol(name), about))
        else:
            found.other[os.path.splitext(key)[1] or "(none)"] += 1
    return found


def _file(key: str, url: str, about: Mapping[str, Any]) -> ImageFile:
    when = next((about[name] for name in _TIMES if about.get(name) is not None), 0)
    if isinstance(when, str):
        try:
            when = datetime.fromisoformat(when)
        except ValueError:
            when = 0
    seconds = when.timestamp() if isinstance(when, datetime) else float(when)
    return ImageFile(key, url, int(about.get("size") or 0), int(seconds * 1e9))
