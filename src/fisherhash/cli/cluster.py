"""Verbs that run on a cluster: index ingest."""

from __future__ import annotations

import time

from fisherhash.cli.base import Json
from fisherhash.cli.index import index_app, report_sync
from fisherhash.system.extras import require_package


@index_app.command
def ingest(
    index: str,
    source: str,
    *,
    model: str | None = None,
    ray: str = "",
    workers: int | None = None,
    device: str = "auto",
    json: Json = False,
) -> None:
    """Encode images on a Ray cluster and add them to an index; it is created if there is none.

    Only new and changed images are encoded; none is removed. If interrupted, the same command
    continues where it stopped.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        source: A folder that all nodes see, a URL such as s3://BUCKET/FOLDER, or a list: a text
            file with one path or URL per line.
        model: A model folder, or the name of a built-in hasher; by default the index's own, for a
            new index the built-in one.
        ray: HOST:PORT of the cluster; by default the one that this machine belongs to, or a new
            one on this machine.
        workers: Number of actors that encode; by default one per GPU, or per core without GPUs.
        device: cpu, cuda, or auto: GPUs where there are some.
        json: Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    require_package("ray", "ray", "index ingest")
    from fisherhash.index.images.ingesting import ingest_images

    report = ingest_images(index, source, model=model, address=ray, workers=workers, device=device)
    report_sync(report, index, began, as_json=json)
