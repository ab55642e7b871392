"""Items as the pages show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from fisherhash.index.items import Item
from fisherhash.pages.html import bits_svg
from fisherhash.web.columns import item_date
from fisherhash.web.gallery import Found, Gallery


@dataclass(frozen=True)
class Card:
    """One image in a grid.

    Attributes:
        id: of its item.
        name: relative to its folder.
        labels: its labels.
        date: when it was taken, or when its file was changed.
        camera: what took it, if known.
        size: bytes of its file.
        version: changes when its file does; part of the addresses of its image.
        distance: of the first code from the query's, if there is one.
        code: its code as a drawing, where requested.
        fine: the distance of its second code, where that was compared.
        combined: the distance of both codes, where that orders the results.
    """

    id: int
    name: str
    labels: tuple[str, ...]
    date: str | None
    camera: str | None
    size: int | None
    version: str
    distance: float | None = None
    code: Markup | None = None
    fine: int | None = None
    combined: float | None = None

    @property
    def apart(self) -> str:
        """The distance for people; a real-valued one has a decimal."""
        return str(self.distance) if isinstance(self.distance, int) else f"{self.distance:.1f}"

    @property
    def both(self) -> str:
        """The distance of both codes for people."""
        return "" if self.combined is None else f"{self.combined:.1f}"

    def image(self, size: str = "medium") -> str:
        """The address of its image."""
        return f"/images/{self.id}/{size}?v={self.version}"


def card_of(
    gallery: Gallery,
    item: Item,
    distance: float | None = None,
    *,
    bits: bool = False,
    against: bytes | None = None,
) -> Card:
    """An item as a card.

    Args:
        gallery: its collection.
        item: the item.
        distance: from the query.
        bits: draw its code.
        against: the code to compare its own with in the drawing.
    """
    camera = item.metadata.get("camera")
    return Card(
        item.id,
        gallery.label(item),
        item.labels,
        item_date(item),
        camera if isinstance(camera, str) else None,
        item.size,
        f"{(item.mtime_ns or 0) & 0xFFFFFFFFFF:x}-{item.size or 0:x}",
        distance,
        code_drawing(item.code, gallery.index.bits, against) if bits else None,
    )


def cards_of(
    gallery: Gallery, found: Iterable[Found], *, bits: bool = False, against: bytes | None = None
) -> list[Card]:
    """What a search found as cards."""
    return [
        replace(
            card_of(gallery, one.item, one.distance, bits=bits, against=against),
            fine=one.fine,
            combined=one.combined,
        )
        for one in found
    ]


def cards_by_id(gallery: Gallery, ids: Iterable[int]) -> dict[int, Card]:
    """The cards of some items that still exist, by id."""
    numbers = np.fromiter(ids, dtype=np.int64)
    items = gallery.index.get_items(numbers) if len(numbers) else []
    return {item.id: card_of(gallery, item) for item in items if item is not None}


def code_drawing(code: bytes, bits: int, against: bytes | None = None) -> Markup:
    """A code as squares; bits that differ from another code are circles."""
    own = np.frombuffer(code, np.uint8)
    other = None if against is None else np.frombuffer(against, np.uint8)
    return Markup(bits_svg(own, bits, against=other))
