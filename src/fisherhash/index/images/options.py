"""The options of a sync, a search and a search for duplicates, each declared once.

The command line, the web API and Python take the same records. A field's help text is its line
among the attributes, its range is in its annotation, and making a record checks both.
"""

# Annotations stay types, not strings: the command line subclasses these classes elsewhere.
from dataclasses import dataclass
from typing import Annotated, Literal

from fisherhash.system.options import Range, check_options

DEFAULT_K = 10
Ranking = Literal["hamming", "real"]
Keep = Literal["best", "first"]
DuplicateCode = Literal["auto", "copy", "own"]


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How an index is brought in sync with a folder.

    Attributes:
        dry_run: Only say what would be done.
        allow_empty: Let an empty folder empty the index.
        moved: The index was in sync with another folder, and this one takes its place.
    """

    dry_run: bool = False
    allow_empty: bool = False
    moved: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What a search returns, and in which order.

    Attributes:
        k: Results per query; by default 10, or all within the radius.
        radius: Only items whose codes differ in at most this many bits.
        where: Only items that match this filter, label=cat or taken>=2020; several must all match,
            and a label may differ in case.
        ranking: hamming counts the bits that differ, real also weighs them by how sure the model
            is of the query's bits.
        count_ties: Also count all items at the distance of a result.
    """

    k: Annotated[int | None, Range(1)] = None
    radius: Annotated[int | None, Range(0, 1024)] = None
    where: tuple[str, ...] = ()
    ranking: Ranking = "hamming"
    count_ties: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class DuplicateOptions:
    """Which items count as likely copies of each other, and what is said about them.

    Attributes:
        radius: Bits in which any two items of a group may differ; by default as many as give about
            one false pair per thousand items, and one in a million comparisons.
        code: copy compares codes that are made for copies, computed once from the files; own
            compares the codes of the index; auto takes copy where the files are there.
        keep: Which item of a group comes first and is kept: best has the most pixels, then the
            oldest file, and is no symbolic link; first was added first.
        confirm: Compare thumbnails; groups that show the same image come first.
        compare_files: Also read the files of each group, and mark those with the same bytes.
    """

    radius: Annotated[int | None, Range(0, 1024)] = None
    code: DuplicateCode = "auto"
    keep: Keep = "best"
    confirm: bool = True
    compare_files: bool = False

    def __post_init__(self) -> None:
        check_options(self)
