"""Files and folders that are complete or absent: written as drafts, then moved into place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.files import NotRegularError, open_regular

if TYPE_CHECKING:
    from torch import Tensor

NEW = ".new"
"""How the name of a draft ends."""

DRAFT_SECONDS = 3600.0
"""Age at which a draft folder counts as abandoned even if its process number is in use again."""

JSON_BYTES = 64 << 20
"""A longer JSON file is none of ours, and is not read."""

Content = str | bytes | Callable[[Path], object]
"""What goes into a file: text, bytes, or a function that writes the file at a given path."""


def write_files(folder: Path, files: Mapping[str, Content]) -> None:
    """Write several files of a folder so that a failure leaves all the old ones in place.

    Every file is written and flushed to disk as a draft first. Only when all of them are on the
    disk are they moved into place, in the given order.

    Raises:
        FisherhashError: a file could not be written; the old files are unchanged.
    """
    drafts = {folder / (name + NEW): folder / name for name in files}
    where = folder.joinpath(*files) if len(files) == 1 else folder
    try:
        make_folder(folder)
        for draft, content in zip(drafts, files.values(), strict=True):
            if callable(content):
                content(draft)
            else:
                text = isinstance(content, str)
                data = content.encode(errors="surrogateescape") if text else content
                draft.write_bytes(data)
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
    except BaseException as error:
        for draft in drafts:
            # A draft that stays behind does no harm, and must not hide why the write failed.
            with contextlib.suppress(OSError):
                draft.unlink()
        if isinstance(error, OSError):
            raise FisherhashError(
                f"could not write {where}: {error.strerror or error}. Nothing there was changed; "
                "make room or choose another folder, then run the command again"
            ) from error
        raise
    for draft, place in drafts.items():
        os.replace(draft, place)
    fsync_folder(folder)


def fsync_file(path: Path) -> None:
    """Wait until the bytes of a file are on the disk."""
    fd = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Make names that were added to a folder or deleted from it durable, where the system can."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems cannot, and say so in this way.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)


def make_folder(folder: Path) -> None:
    """Make a folder with the folders above it, durably."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in new:
        fsync_folder(one.parent)


def write_file(path: str | os.PathLike[str], content: Content) -> None:
    """Write one file: afterwards it is complete, or it is what it was before.

    Args:
        path: the file; its folder is created if necessary.
        content: text, bytes, or a function that writes to the path it is given. That path ends in
            ``.new``, so a writer that chooses a format by the extension must be told the format.

    Raises:
        UsageError: the path is a folder.
        FisherhashError: the file could not be written.
    """
    place = Path(path)
    if place.is_dir():
        raise UsageError(f"{place} is a folder; give the name of a file")
    write_files(place.parent, {place.name: content})


@contextlib.contextmanager
def draft_folder(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder that is complete or absent: yields an empty draft, then moves it into place.

    The draft lies beside ``place`` under a name of its own, so that several processes may make the
    same folder; the first to finish wins. A failure removes the draft. Drafts that killed processes
    left for the same place are removed first.

    Args:
        place: the folder to make. It may exist if it is empty.

    Raises:
        FileExistsError: by the end, ``place`` has content; the draft was removed.
    """
    place = Path(os.path.abspath(place))
    make_folder(place.parent)
    remove_old_drafts(place)
    draft = place.with_name(f".{place.name}.{os.getpid()}-{time.time_ns():x}{NEW}")
    draft.mkdir()
    try:
        yield draft
        try:
            if place.is_dir():
                place.rmdir()
            fsync_folder(draft)
            os.rename(draft, place)
        except OSError as error:
            if place.is_dir() and any(place.iterdir()):
                raise FileExistsError(f"{place} exists already and is not empty") from error
            raise
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    # Without this, a power cut may take away the whole folder, though all its files are stored.
    fsync_folder(place.parent)


def remove_old_drafts(place: str | os.PathLike[str]) -> None:
    """Remove what killed processes left of :func:`draft_folder` for the same place."""
    place = Path(os.path.abspath(place))
    form = re.compile(rf"\.{re.escape(place.name)}\.(\d+)-[0-9a-f]+{re.escape(NEW)}")
    with contextlib.suppress(OSError), os.scandir(place.parent) as entries:
        for entry in entries:
            if match := form.fullmatch(entry.name):
                old = time.time() - entry.stat().st_mtime > DRAFT_SECONDS
                if old or not _is_running(int(match[1])):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_running(process: int) -> bool:
    """Whether a process may exist; True where the system cannot say."""
    if os.name == "posix":
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:
            return True
    return True


def write_tensors(tensors: Mapping[str, Tensor]) -> Content:
    """Tensors as the content of a safetensors file, for :func:`write_files`."""
    from safetensors.torch import save

    return save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        FisherhashError: the file is missing, unreadable or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = read_bytes(path)
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RecursionError, RuntimeError) as error:
        raise _bad_tensors(path, error) from None


def _bad_tensors(path: Path, reason: object) -> FisherhashError:
    return FisherhashError(
        f"{path} is damaged or truncated ({reason}); restore it from a copy or train again"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FisherhashError: the file is missing, unreadable, or holds no JSON object.
    """
    data = _read(path, JSON_BYTES)
    try:
        value = json.loads(data.decode())
    except ValueError as error:
        raise FisherhashError(f"{path} is damaged: {error}") from None
    except RecursionError:
        raise FisherhashError(f"{path} is damaged: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise FisherhashError(f"{path} is damaged: it holds no JSON object")
    return value


def read_bytes(path: Path) -> bytes:
    """Read a file.

    Raises:
        FisherhashError: the file is missing or cannot be read.
    """
    return _read(path)


def _read(path: Path, most: int | None = None) -> bytes:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if most is not None and size > most:
                raise FisherhashError(
                    f"{path} is damaged: it has {size:,} bytes, too many to be read"
                )
            return file.read() if most is None else file.read(most)
    except MemoryError:
        raise FisherhashError(f"{path} does not fit into memory") from None
    except FileNotFoundError:
        raise FisherhashError(f"{path} is missing") from None
    except NotRegularError:
        raise FisherhashError(f"{path} cannot be read: it is not a regular file") from None
    except OSError as error:
        raise FisherhashError(f"{path} cannot be read: {error.strerror or error}") from None


def dump_json(value: Any) -> str:
    """JSON that people and programs can read, with a final newline."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:
        # A file name that is not UTF-8: written as escapes, which JSON reads back.
        text = json.dumps(value, indent=2) + "\n"
    return text


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    names = sorted(tensors)
    values = _flat_values([tensors[name] for name in names])
    for name, flat in zip(names, values, strict=True):
        digest.update(f"{name} {flat.dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _flat_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values (n,) of each of some tensors, on the CPU.

    Those of a GPU are copied together, because each copy waits for what the GPU does, and beside
    other processes for its turn.
    """
    import torch

    found = [tensor.detach().contiguous().flatten() for tensor in tensors]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(found):
        if tensor.device.type != "cpu":
            groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    for places in groups.values():
        together = torch.cat([found[place] for place in places]).cpu()
        parts = together.split([len(found[place]) for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part
    return found
