"""The back-end for ``ray://``: shards of an index in actors of a Ray cluster."""

from fisherhash.system.extras import require_package

require_package("ray", "ray", "an index on a Ray cluster")

from fisherhash.index.cluster.index import ClusterIndex  # noqa: E402 (needs ray)

__all__ = ["ClusterIndex"]
