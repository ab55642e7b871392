"""One search as an address says it: the query, how many results, how near, and the filters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode

from fisherhash.codes import from_hex
from fisherhash.errors import UsageError
from fisherhash.index.images.nearest import FINE_WEIGHT
from fisherhash.index.ranking import check_fine_weight

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams as Params

DEFAULT_SHOWN = 24
MOST_SHOWN = 500
"""Results of one search."""
MOST_FILTERS = 20
_LARGEST_ID = 2**62
KNOWN_RANKINGS = ("hamming", "real")
_LONGEST_CODE = 128
TIES = "ties"
"""The value of ``fine_weight`` that lets second codes order only what is at the same distance."""
UNASKED: dict[str, Any] = {
    "code": None,
    "image": None,
    "weights": None,
    "fine": None,
    "ranking": "hamming",
}
"""What only a query with an uploaded image has."""


@dataclass(frozen=True)
class SearchQuery:
    """What to search for; without an item or a code it only selects items.

    Attributes:
        item: the id of the item to search with.
        code: the packed code to search with.
        image: the name of an uploaded image whose code this is.
        weights: how sure the model is of each bit of the code, 0 to 255, for the ranking ``real``.
        fine: the second code of an uploaded image.
        k: the most results.
        radius: only items whose first codes differ in at most this many bits.
        where: filters, all of which must match.
        ranking: how bits that differ count.
        fine_weight: what a bit of the second code counts, where the index has those; None lets them
            order only what is at the same distance.
        bits: whether the codes are shown.
        seed: which random items are shown where nothing is searched for.
    """

    item: int | None = None
    code: bytes | None = None
    image: str | None = None
    weights: bytes | None = None
    fine: bytes | None = None
    k: int = DEFAULT_SHOWN
    radius: int | None = None
    where: tuple[str, ...] = ()
    ranking: str = "hamming"
    fine_weight: float | None = FINE_WEIGHT
    bits: bool = False
    seed: int = 0

    @classmethod
    def parse(cls, params: Params, bits: int) -> Self:
        """Read a query from an address.

        Args:
            params: the parameters of the address.
            bits: length of the codes of the index.

        Raises:
            UsageError: one of them is not as it must be.
        """
        code, image = params.get("code"), params.get("image")
        item = _number(params, "like", 0, _LARGEST_ID)
        if code is not None and item is not None:
            raise UsageError("search with an item (like) or with a code, not with both")
        if image is not None and not (len(image) == 40 and set(image) <= set("0123456789abcdef")):
            raise UsageError("image must be the name that the server gave an upload")
        where = tuple(text for text in params.getlist("where") if text)
        if len(where) > MOST_FILTERS:
            raise UsageError(f"{len(where)} filters are too many, the most is {MOST_FILTERS}")
        ranking = params.get("ranking") or "hamming"
        if ranking not in KNOWN_RANKINGS:
            raise UsageError(f"ranking must be one of {', '.join(KNOWN_RANKINGS)}, got {ranking!r}")
        k = _number(params, "k", 1, MOST_SHOWN)
        return cls(
            item=item,
            code=None if not code else from_hex([code], bits)[0].tobytes(),
            image=image if code else None,
            weights=_bytes(params, "weights", bits) if code else None,
            fine=_bytes(params, "fine") if code else None,
            k=DEFAULT_SHOWN if k is None else k,
            radius=_number(params, "radius", 0, bits),
            where=where,
            ranking=ranking,
            fine_weight=_weight(params),
            bits=params.get("bits") in ("1", "true"),
            seed=_number(params, "seed", 0, 2**32) or 0,
        )

    @property
    def searches(self) -> bool:
        """Whether there is something to search for."""
        return self.item is not None or self.code is not None

    @property
    def other_weight(self) -> str:
        """The weight of the second code as an address has it; empty for the usual one."""
        return "" if self.fine_weight == FINE_WEIGHT else weight_text(self.fine_weight)

    def params(self) -> str:
        """The query as the parameters of an address; defaults are left out."""
        pairs: list[tuple[str, str | int]] = []
        if self.item is not None:
            pairs.append(("like", self.item))
        if self.code is not None:
            pairs.append(("code", self.code.hex()))
        if self.image is not None:
            pairs.append(("image", self.image))
        if self.weights is not None:
            pairs.append(("weights", self.weights.hex()))
        if self.fine is not None:
            pairs.append(("fine", self.fine.hex()))
        if self.k != DEFAULT_SHOWN:
            pairs.append(("k", self.k))
        if self.radius is not None:
            pairs.append(("radius", self.radius))
        pairs += [("where", text) for text in self.where]
        if self.ranking != "hamming":
            pairs.append(("ranking", self.ranking))
        if self.other_weight:
            pairs.append(("fine_weight", self.other_weight))
        if self.bits:
            pairs.append(("bits", "1"))
        if self.seed:
            pairs.append(("seed", self.seed))
        return urlencode(pairs)

    def url(self, path: str = "/", **changes: Any) -> str:
        """The address of this query with some changes."""
        params = replace(self, **changes).params() if changes else self.params()
        return f"{path}?{params}" if params else path

    def like(self, item: int) -> str:
        """The address that searches with an item, with the same filters and sliders."""
        return self.url(item=item, seed=0, **UNASKED)

    def with_filter(self, text: str) -> str:
        """The address with one more filter, or without it where it is there already."""
        if text in self.where:
            return self.url(where=tuple(one for one in self.where if one != text))
        return self.url(where=(*self.where, text))


def weight_text(fine_weight: float | None) -> str:
    """The weight of the second code as an address has it."""
    return TIES if fine_weight is None else repr(float(fine_weight))


def _weight(params: Params) -> float | None:
    text = params.get("fine_weight")
    if not text:
        return FINE_WEIGHT
    if text == TIES:
        return None
    try:
        # float also takes "1_0", and digits of other scripts
        if not text.isascii() or "_" in text:
            raise ValueError
        weight = float(text)
        check_fine_weight(weight)
    except ValueError:
        raise UsageError(f"fine_weight must be a number, or {TIES}, got {text!r}") from None
    return weight


def _bytes(params: Params, name: str, length: int | None = None) -> bytes | None:
    text = params.get(name)
    if not text:
        return None
    try:
        found = bytes.fromhex(text)
    except ValueError:
        raise UsageError(f"{name} must be hexadecimal") from None
    if len(found) != length if length is not None else len(found) > _LONGEST_CODE:
        raise UsageError(f"{name} has {len(found):,} bytes, which is not their number here")
    return found


def _number(params: Params, name: str, least: int, most: int) -> int | None:
    text = params.get(name)
    if text is None or text == "":
        return None
    # isdecimal alone also takes digits of other scripts, and int alone takes "1_0".
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise UsageError(f"{name} must be a whole number from {least:,} to {most:,}, got {text!r}")
    return int(text)


def parse_number_of(params: Params, name: str, default: int, least: int, most: int) -> int:
    """A whole number of an address, or a default.

    Raises:
        UsageError: it is none, or out of its range.
    """
    number = _number(params, name, least, most)
    return default if number is None else number
