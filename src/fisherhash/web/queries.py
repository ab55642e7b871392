"""What an address may say: the queries of pages and API, declared once for both.

FastAPI reads the parameters, their ranges and the description of the API from these classes. Help
texts and ranges come from the options of an index of images; the limits of a server are added.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fisherhash.index.images.options import DuplicateCode, DuplicateOptions, Ranking, SearchOptions
from fisherhash.system.options import options_of

DEFAULT_SHOWN, MOST_SHOWN = 24, 500
"""Results of one search."""
MOST_FILTERS = 20
MOST_LISTED = 1000
LARGEST_ID = 2**62
QueryCode = Annotated[str, Field(pattern="^[0-9a-fA-F]{2,256}$")]
UploadName = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
Size = Literal["small", "medium", "large"]


def _option(options: type, name: str, default: Any, **limits: Any) -> Any:
    """A field with the help text and the range of an option; ``limits`` replace some of these."""
    option = next(one for one in options_of(options) if one.name == name)
    ends = {"ge": option.range.least, "le": option.range.most}
    about: dict[str, Any] = {end: value for end, value in ends.items() if math.isfinite(value)}
    about |= {"description": option.help, **limits}
    return Field(default, **about)


class Filters(BaseModel):
    """Which items are meant. An unknown parameter is an error, here and in all classes below."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    where: tuple[str, ...] = _option(SearchOptions, "where", (), max_length=MOST_FILTERS)


class ItemsQuery(Filters):
    """One part of the list of items."""

    limit: int = Field(default=100, ge=1, le=MOST_LISTED, description="The most items.")
    after: int = Field(default=-1, ge=-1, le=LARGEST_ID, description="Only items with larger ids.")


class NearestQuery(Filters):
    """Which items a search returns, whatever it searches with."""

    k: int = Field(default=DEFAULT_SHOWN, ge=1, le=MOST_SHOWN, description="The most results.")
    radius: int | None = _option(SearchOptions, "radius", None)


class ImageQuery(NearestQuery):
    """A search with an image, which comes in the body of the request."""

    ranking: Ranking = _option(SearchOptions, "ranking", "hamming")


class SearchQuery(NearestQuery):
    """What to search for, and how; without an item or a code it only selects items."""

    like: int | None = Field(
        default=None, ge=0, le=LARGEST_ID, description="Search with the item of this id."
    )
    key: str | None = Field(default=None, description="Search with the item of this key.")
    code: QueryCode | None = Field(default=None, description="Search with this code, as hex.")

    @model_validator(mode="after")
    def _one_query(self) -> Self:
        if sum(one is not None for one in (self.like, self.key, self.code)) > 1:
            raise ValueError("search with one of like, key and code")
        return self

    @property
    def searches(self) -> bool:
        """Whether there is something to search for."""
        return any(one is not None for one in (self.like, self.key, self.code))


class PageQuery(SearchQuery):
    """A search as the address of the search page has it."""

    image: UploadName | None = Field(default=None, description="The upload that has this code.")
    bits: bool = Field(default=False, description="Show the codes.")
    seed: int = Field(default=0, ge=0, le=2**32, description="Which random items to show.")

    def url(self, path: str = "/", **changes: Any) -> str:
        """The address of this query with some changes; what has its default is left out."""
        said = self.model_copy(update=changes).model_dump(exclude_defaults=True)
        pairs = {name: int(v) if isinstance(v, bool) else v for name, v in said.items()}
        return f"{path}?{urlencode(pairs, doseq=True)}" if pairs else path

    def toggled(self, text: str) -> str:
        """The address with one more filter, or without it where it is there already."""
        others = tuple(one for one in self.where if one != text)
        return self.url(where=others if text in self.where else (*self.where, text))


class DuplicatesQuery(BaseModel):
    """Which groups of duplicates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    radius: int | None = _option(DuplicateOptions, "radius", None)
    code: DuplicateCode = _option(DuplicateOptions, "code", "auto")


class GroupsQuery(DuplicatesQuery):
    """The same, one page of groups at a time."""

    start: int = Field(default=0, ge=0, le=10**9, description="Groups to leave out.")
