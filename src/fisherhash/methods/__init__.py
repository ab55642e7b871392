"""Ways to learn codes, each in one file. Adding one: write the file, import it here, test it."""

from fisherhash.methods import dfh, shallow
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
    "dfh",
    "find",
    "hyper_parameters",
    "register",
    "registry",
    "resolved_options",
    "shallow",
]
