"""Lists of images: a CSV ``path,label[;label…]``, or a folder with three list files.

The package holds the list files of the stand-ins tiny100 and coco21, not their images.
"""

from __future__ import annotations

import csv
import json
import lzma
import os
import posixpath
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection, FileReader, one_hot
from fisherhash.data.formats import is_image_name
from fisherhash.errors import UsageError, counted, unknown_name
from fisherhash.system.storage import write_files

PATH_HEADERS = {"path", "image", "file", "filename", "file_name", "filepath", "image_path", "name"}
LABEL_HEADERS = {"label", "labels", "class", "classes", "tag", "tags", "category", "categories"}
LIST_FILES = {
    "train": ("train.txt",),
    "query": ("query.txt", "test.txt"),
    "database": ("database.txt",),
}
"""The file names of each split; public lists call the queries ``test.txt``."""

STAND_INS = Path(__file__).parent / "standins.json.xz"
"""The lists of tiny100 and coco21: a JSON object of files by name, for each."""

_FLAGS = re.compile(r"(?:[ \t]+[01])+$")


def open_csv(path: Path) -> Collection:
    """Open a CSV with the columns ``path`` and ``label``; ``;`` separates several labels.

    Paths are relative to the folder of the CSV. Without a label column, images have no labels.
    """
    rows = _csv_rows(path)
    if not rows:
        raise UsageError(f"{path} is empty; its first line must be 'path,label'")
    *columns, first = _csv_columns(path, rows[0][1])
    lines: dict[str, int] = {}
    labels: list[list[str]] = []
    for line, row in rows[first:]:
        value, text = (row[c].strip() if c is not None and c < len(row) else "" for c in columns)
        if not value:
            raise UsageError(f"{path}, line {line}: the path is missing")
        name = _relative_name(value, path.parent)
        if name in lines:
            raise UsageError(
                f"{path}, line {line}: '{name}' is already in line {lines[name]}; "
                "write all labels of an image in one row, as in 'path,cat;dog'"
            )
        lines[name] = line
        labels.append([part.strip() for part in text.split(";") if part.strip()])
    names = list(lines)
    if not names:
        raise UsageError(f"{path} has a header but no images; add one line 'path,label' per image")
    unlabelled = [line for line, own in zip(lines.values(), labels, strict=True) if not own]
    if unlabelled and columns[1] is not None:
        raise UsageError(
            f"{path}, line {unlabelled[0]}: the label is missing "
            f"({len(unlabelled)} of {len(names)} rows have none). "
            "Add the labels, or remove the column to use the images without labels"
        )
    _check_some_exist(path, path.parent, names)
    classes = tuple(sorted({label for own in labels for label in own}))
    number = {label: column for column, label in enumerate(classes)}
    matrix = np.zeros((len(names), len(classes)), dtype=np.uint8)
    for row_number, own in enumerate(labels):
        matrix[row_number, [number[label] for label in own]] = 1
    return Collection(
        name=path.stem,
        names=names,
        labels=matrix,
        classes=classes,
        reader=FileReader(path.parent, names),
        kind="csv" if classes else "photos",
    )


def is_list_folder(folder: Path) -> bool:
    """Whether a folder is meant to be read by its list files."""
    found = {split for split in LIST_FILES if _list_path(folder, split)}
    return "database" in found or {"train", "query"} <= found


def open_lists(folder: Path) -> Collection:
    """Open a folder with ``train.txt``, ``query.txt`` and ``database.txt``.

    A line is ``path 0 1 0 …`` (one flag per class) or ``path`` alone (its first folder is the
    class). ``classes.txt`` may name the classes, one per line.
    """
    lists = {split: _read_list(folder, split) for split in LIST_FILES}
    classes = _read_classes(folder / "classes.txt")
    width = _flag_count([line for own in lists.values() for line in own], len(classes))
    known, splits, notes = _merge(lists, width)
    rows = [row for _, row, _ in known.values()]
    if width:
        classes = classes or tuple(f"class {number}" for number in range(width))
        flags = np.frombuffer("".join(rows).encode(), dtype=np.uint8)
        labels = (flags - ord("0")).reshape(-1, width)
    else:
        classes = classes or tuple(sorted(set(rows)))
        number = {name: column for column, name in enumerate(classes)}
        for name, (_, row, line) in known.items():
            if row not in number:
                listed = folder / "classes.txt"
                raise line.error(f"the class '{row}' of '{name}' is not in {listed}")
        labels = one_hot([number[row] for row in rows], len(classes))
    names = list(known)
    _check_some_exist(folder, folder, names)
    return Collection(
        name=folder.name or str(folder),
        names=names,
        labels=labels,
        classes=classes,
        reader=FileReader(folder, names),
        splits=splits,
        kind="lists",
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a list file, and how to complain about it."""

    file: Path
    number: int
    text: str

    def error(self, sentence: str) -> UsageError:
        return UsageError(f"{self.file}, line {self.number}: {sentence}")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, without line ends and without a byte-order mark."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 text; save the list as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    # Not splitlines(): it also splits at characters that file names may contain.
    return [line.rstrip("\r") for line in text.split("\n")]


def _csv_rows(path: Path) -> list[tuple[int, list[str]]]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader((f"{line}\n" for line in read_lines(path)), delimiter=delimiter)
    try:
        return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}") from None


def _csv_columns(path: Path, header: Sequence[str]) -> tuple[int, int | None, int]:
    """Return the path column, the label column (or None) and the number of header rows."""
    words = [cell.strip().lower() for cell in header]
    paths, labels = (
        next((column for column, word in enumerate(words) if word in known), None)
        for known in (PATH_HEADERS, LABEL_HEADERS)
    )
    if paths is None and is_image_name(words[0]):
        return 0, 1 if len(words) > 1 else None, 0
    if paths is None:
        raise UsageError(
            f"{path}, line 1: expected the header 'path,label', found '{','.join(header)[:80]}'"
        )
    if labels is None and len(words) > 1:
        raise UsageError(
            f"{path}, line 1: no label column among '{','.join(header)}'; "
            "the header must be 'path,label' (or 'path' alone for images without labels)"
        )
    return paths, labels, 1


def _posix(value: str) -> str:
    """Normalise a listed path to POSIX style."""
    value = value.strip()
    if "\\" in value and "/" not in value:
        value = value.replace("\\", "/")
    return posixpath.normpath(value.replace(os.sep, "/"))


def _relative_name(value: str, root: Path) -> str:
    """Make a listed path relative to ``root`` if it lies inside."""
    if os.path.isabs(value):
        inside = os.path.relpath(value, root.absolute())
        value = value if inside.startswith("..") else inside
    return _posix(value)


def _list_path(folder: Path, split: str) -> Path | None:
    paths = (folder / name for name in LIST_FILES[split])
    return next((path for path in paths if path.is_file()), None)


def _read_classes(path: Path) -> tuple[str, ...]:
    """The names of the classes; what follows a tab is a description."""
    if not path.is_file():
        return ()
    names = tuple(line.partition("\t")[0].strip() for line in read_lines(path) if line.strip())
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"{path} names the class '{repeated[0]}' twice")
    return names


def _read_list(folder: Path, split: str) -> list[_Line]:
    path = _list_path(folder, split)
    if path is None:
        raise UsageError(
            f"{folder} has list files but no {LIST_FILES[split][0]}; "
            "train.txt, query.txt and database.txt are all needed"
        )
    texts = (text.strip() for text in read_lines(path))
    lines = [_Line(path, number, text) for number, text in enumerate(texts, 1) if text]
    if not lines:
        raise UsageError(f"{path} is empty; write one image per line")
    return lines


def _flag_count(lines: Sequence[_Line], classes: int) -> int:
    """Count the 0/1 flags that end every line; 0 for plain paths. Every line must agree."""
    matches = (_FLAGS.search(line.text) for line in lines)
    counts = [len(match[0].split()) if match else 0 for match in matches]
    if not any(counts):
        return 0
    # A path may itself end in ' 1': the shortest run of flags is the one without such a path.
    width = classes or min(count for count in counts if count)
    for line, count in zip(lines, counts, strict=True):
        if count < width:
            reason = f" (classes.txt names {classes})" if classes else ""
            expected = f"expected {width} flags of 0 or 1 after the path{reason}"
            raise line.error(f"found {count or 'no'} labels, {expected}")
    return width


def _parse(line: _Line, width: int) -> tuple[str, str]:
    """Return the name of an image, and its flags or its class."""
    if width:
        path, *flags = line.text.rsplit(None, width)
        return _posix(path), "".join(flags)
    name = _posix(line.text)
    folder, slash, _ = name.partition("/")
    if not slash or folder == "..":
        raise line.error(
            f"'{name}' has no labels and no class folder; write 'path 0 1 0 …' or 'class/image.jpg'"
        )
    return name, folder


def _merge(
    lists: Mapping[str, Sequence[_Line]], width: int
) -> tuple[dict[str, tuple[int, str, _Line]], dict[str, NDArray[np.int64]], list[str]]:
    """Merge the lists: the number, labels and first line of each image; splits and notes."""
    known: dict[str, tuple[int, str, _Line]] = {}
    splits: dict[str, NDArray[np.int64]] = {}
    notes: list[str] = []
    # The database first: its order is the order of the collection.
    for split in ("database", "train", "query"):
        members: dict[int, None] = {}
        for line in lists[split]:
            name, row = _parse(line, width)
            item, labels, first = known.setdefault(name, (len(known), row, line))
            if labels != row:
                raise line.error(
                    f"'{name}' has other labels than in {first.file.name}, line {first.number}"
                )
            members[item] = None
        if repeated := len(lists[split]) - len(members):
            file = lists[split][0].file.name
            notes.append(f"{file} repeats {counted(repeated, 'line')}; each image counts once")
        splits[split] = np.fromiter(members, dtype=np.int64)
    return known, splits, notes


def _check_some_exist(listed: Path, root: Path, names: Sequence[str]) -> None:
    """Refuse a list of which no image exists, instead of skipping them one by one."""
    if not any((root / name).is_file() for name in names[:: max(1, len(names) // 20)]):
        raise UsageError(
            f"{listed}: none of the listed images was found below {root} (looked for "
            f"'{names[0]}' and others); put the images there, or correct the paths in the list"
        )


def write_lists(name: str, dest: str | os.PathLike[str]) -> Path:
    """Write the four list files of ``tiny100`` or ``coco21`` into ``dest``, a folder."""
    packed = json.loads(lzma.decompress(STAND_INS.read_bytes()))
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
