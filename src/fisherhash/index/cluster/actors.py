"""The actors of this process on a cluster, and calls to them that survive the loss of a node."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.cluster.holder import Answer, Shard, ShardHolder
from fisherhash.index.cluster.storage import ClusterPlace

_PAUSE = 0.2
_lock = threading.RLock()
_holders: list[Any] = []
_users: Counter[Shard] = Counter()


def connect_ray(address: str, uri: str) -> None:
    """Connect this process to a cluster, unless it is connected already.

    Args:
        address: HOST:PORT; empty for the cluster that this machine belongs to, or else a new one.
        uri: what needs it, for the error.
    """
    with _lock:
        if ray.is_initialized():
            return
        _holders.clear()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = address or os.environ.get("RAY_ADDRESS", "")
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        try:
            if address:
                ray.init(address=address, **quiet)
                return
            try:
                ray.init(address="auto", **quiet)
            except ConnectionError:
                ray.init(include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError, RayError, ValueError) as error:
            where = address or "a local Ray cluster"
            raise FisherhashError(
                f"{uri}: cannot connect to {where}: {error}. Start one with: ray start --head"
            ) from error


def start_actor(kind: type, *args: Any, **options: Any) -> Any:
    """An actor of a class; one that dies is started again on another node."""
    remote: Any = ray.remote
    return remote(max_restarts=-1, **options)(kind).remote(*args)


def _pool(count: int) -> list[Any]:
    """At least ``count`` actors, in turn on all nodes; a dead one is started again elsewhere."""
    with _lock:
        nodes: list[str] = []
        while len(_holders) < count:
            nodes = nodes or [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            near = NodeAffinitySchedulingStrategy(nodes[len(_holders) % len(nodes)], soft=True)
            options = {"num_cpus": 0, "scheduling_strategy": near}
            _holders.append(start_actor(ShardHolder, **options))
        return list(_holders)


class ShardCalls:
    """Calls to all shards of an index: every one answers, or there is an error."""

    def __init__(self, place: ClusterPlace, version: str) -> None:
        self._place = place
        self._shards = [
            Shard(place.storage, version, place.shards, number) for number in range(place.shards)
        ]
        self._turn = 0
        connect_ray(place.address, place.uri)
        with _lock:
            _users.update(self._shards)

    def call(self, method: str, commit: int, *args: Any) -> list[Answer]:
        """The answers of all shards, in their order."""
        self._turn += 1
        refs = [self._send(shard, self._turn, method, commit, args) for shard in self._shards]
        deadline = time.monotonic() + self._place.timeout
        return [
            self._answer(shard, ref, deadline, method, commit, args)
            for shard, ref in zip(self._shards, refs, strict=True)
        ]

    def _send(self, shard: Shard, turn: int, method: str, commit: int, args: Sequence[Any]) -> Any:
        replicas = self._place.replicas
        pool = _pool(max(self._place.shards, replicas))
        holder = pool[(shard.number + turn % replicas) % len(pool)]
        try:
            return getattr(holder, method).remote(shard, commit, *args)
        except RayError as error:
            return error

    def _answer(
        self,
        shard: Shard,
        ref: Any,
        deadline: float,
        method: str,
        commit: int,
        args: Sequence[Any],
    ) -> Answer:
        turn, reason = self._turn, ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                if isinstance(ref, Exception):
                    raise ref
                return Answer(*ray.get(ref, timeout=left))
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, UsageError | FisherhashError):
                    raise type(cause)(str(cause)) from error
                raise FisherhashError(f"{self._name(shard)} failed: {cause}") from error
            except GetTimeoutError:
                reason = "it did not answer in time"
                break
            except RayActorError as error:
                # Another replica, or the same actor, which is started again on another node.
                reason = "its node or its process ended"
                del error
                turn += 1
                if self._place.replicas == 1 or (turn - self._turn) % self._place.replicas == 0:
                    time.sleep(_PAUSE)
                ref = self._send(shard, turn, method, commit, args)
            except RayError as error:
                reason = str(error).splitlines()[0]
                time.sleep(_PAUSE)
                ref = self._send(shard, turn, method, commit, args)
        raise FisherhashError(
            f"{self._name(shard)} cannot be reached within {self._place.timeout} s ({reason}), so "
            "there is no complete answer. Add nodes, or replicas=2 to the URI, and try again"
        )

    def _name(self, shard: Shard) -> str:
        return f"{self._place.uri}: shard {shard.number + 1} of {shard.shards}"

    def close(self) -> None:
        """Forget the shards on the cluster, unless another index of this process uses them."""
        with _lock:
            _users.subtract(self._shards)
            unused = [shard for shard in self._shards if _users[shard] <= 0]
            for shard in unused:
                del _users[shard]
            if ray.is_initialized():
                for holder in _holders:
                    for shard in unused:
                        holder.drop.remote(shard)
