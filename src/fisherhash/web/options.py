"""What `fisherhash serve` was told, as one value that can be handed to worker processes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from fisherhash.errors import UsageError


@dataclass(frozen=True)
class ServeOptions:
    """How an index is served.

    Attributes:
        index: the path or the URI of the index.
        host: the address to listen on.
        port: the port; 0 takes a free one.
        token: needed for changes and, on any other address than this machine's own, for everything.
        writable: whether images may be added and removed through the API.
        uploads: the folder for images that are added; by default the one the index is in sync with.
        show_from: folders whose images may be shown, beside those that the index was filled from.
        device: where to encode images.
        skip_damaged: leave out items whose codes are damaged.
        max_upload: the most bytes of an upload.
        max_pixels: the most pixels of an uploaded image.
        seconds: the most time that a request may take, and that its body may take to arrive.
        cache_bytes: the most bytes of thumbnails on disk.
    """

    index: str
    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None
    writable: bool = False
    uploads: str | None = None
    show_from: tuple[str, ...] = ()
    device: str = "cpu"
    skip_damaged: bool = False
    max_upload: int = 32 << 20
    max_pixels: int = 50_000_000
    seconds: float = 30.0
    cache_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"the port must be between 0 and 65535, got {self.port}")
        if self.token is not None and len(self.token) < 8:
            raise UsageError("a token needs at least 8 characters")
        if self.token is None and (self.writable or not self.local):
            what = "a writable server" if self.writable else f"listening on {self.host}"
            raise UsageError(f"{what} needs a token: --token TOKEN")
        for name in ("max_upload", "max_pixels", "seconds", "cache_bytes"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
