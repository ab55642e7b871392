"""Optional packages: a missing one is reported before the work that would need it at the end."""

from __future__ import annotations

import importlib.util

from fisherhash.errors import missing_extra


def require_package(package: str, extra: str, purpose: str) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        package: its name.
        extra: the extra of fisherhash that installs it.
        purpose: what it is needed for; the error begins with it.

    Raises:
        FisherhashError: it is not installed; says how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise missing_extra(package, extra, purpose)
