"""Errors, whose messages say what was found, where, and what to do next; words for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FisherhashError(Exception):
    """Something failed; the command line prints the message and exits with code 1."""

    exit_code = 1


class UsageError(FisherhashError):
    """The request is wrong (a name, a number, a folder); exit code 2."""

    exit_code = 2


class NotDefinedError(UsageError):
    """A method is not defined for this data or code length; a comparison prints a dash."""


class DivergedError(FisherhashError):
    """A loss became infinite or not a number."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return an error for a name that is not in ``known``, with the nearest one that is.

    >>> print(unknown_name("method", "dhf", ["dfh", "dsh", "lsh"]))
    unknown method 'dhf'. Did you mean 'dfh'? Known: dfh, dsh, lsh
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=12, cutoff=0.4)
    # Swapped letters are the likeliest typo.
    near.sort(key=lambda other: sorted(other) != sorted(name.lower()))
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UsageError(f"unknown {kind} '{name}'.{hint} Known: {', '.join(names)}")


def missing_extra(package: str, extra: str, purpose: str) -> FisherhashError:
    """Return an error for a missing optional dependency, with the command that installs it."""
    return FisherhashError(
        f"{purpose} needs the package '{package}', which is not installed. "
        f"Install it with: pip install 'fisherhash[{extra}]'"
    )


EXTRA_OF = {
    "torch": "train",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "numba": "fast",
    "scipy": "train",
    "sklearn": "train",
    "fastapi": "web",
    "starlette": "web",
    "uvicorn": "web",
    "watchfiles": "web",
}
"""The optional packages that whole modules of this package import, with the extra that has them."""


def not_installed(error: ModuleNotFoundError, purpose: str) -> Exception:
    """Return the error for an import that failed: the missing extra, or the error itself.

    >>> print(not_installed(ModuleNotFoundError(name="torch"), "training"))  # doctest: +ELLIPSIS
    training needs the package 'torch', ... pip install 'fisherhash[train]'
    """
    package = (error.name or "").partition(".")[0]
    if package in EXTRA_OF:
        return missing_extra(package, EXTRA_OF[package], purpose)
    return error


def printable(name: str) -> str:
    r"""Escape the characters of a name that would break a line or control a terminal.

    These are control characters (also those of 8-bit terminals, 0x80 to 0x9f, as bytes that are not
    UTF-8 too), marks that turn the direction of the text, and invisible ones. Other bytes of a file
    name that are not UTF-8 stay unchanged.

    >>> print(printable("two\nlines.jpg"))
    two\nlines.jpg
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() or "\udca0" <= c <= "\udcff" else _escaped(c) for c in name)


def printable_text(text: str) -> str:
    """Escape every line of a text like a name; the line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(c: str) -> str:
    return f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else ascii(c)[1:-1]


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    >>> counted(1, "image"), counted(2000, "query", "queries")
    ('1 image', '2,000 queries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
