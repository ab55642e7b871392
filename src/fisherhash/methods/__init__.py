"""Methods that learn codes, one file each: here, or in any other package, see :func:`find`."""

import importlib
import pkgutil

from fisherhash.methods.base import (
    Batch,
    FeatureMethod,
    HashMethod,
    MethodInfo,
    Progress,
    create,
    find,
    hyper_parameters,
    register,
    registry,
    resolved_options,
)

__all__ = [
    "Batch",
    "FeatureMethod",
    "HashMethod",
    "MethodInfo",
    "Progress",
    "create",
    "find",
    "hyper_parameters",
    "register",
    "registry",
    "resolved_options",
]

for _file in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_file.name)  # importing a method registers it
