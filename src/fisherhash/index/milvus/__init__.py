"""The back-end for ``milvus://``: one collection per index, on a server or in a local file."""

from fisherhash.system.extras import require_package

require_package("pymilvus", "milvus", "an index on Milvus")

from fisherhash.index.milvus.index import MilvusIndex  # noqa: E402 (needs pymilvus)

__all__ = ["MilvusIndex"]
