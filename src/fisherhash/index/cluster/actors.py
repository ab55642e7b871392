"""Actors on a Ray cluster that hold shards, and calls to them that survive the loss of a node."""

from __future__ import annotations

import os
import threading
import time
import uuid
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fisherhash.errors import FisherhashError
from fisherhash.index.engine import Engine
from fisherhash.index.uris import ServerUri

_PAUSE = 0.2
_lock = threading.RLock()
_holders: list[Any] = []


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
    """Start an actor of a class; one that dies is started again on another node."""
    remote: Any = ray.remote
    return remote(max_restarts=-1, **options)(kind).remote(*args)


class ShardHolder:
    """Holds shards of any number of indexes, and searches them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[int, Engine]] = {}

    def load(
        self, index: str, number: int, commit: int, codes: NDArray[np.uint8], bits: int
    ) -> None:
        """Hold the codes of a shard, as a commit left them."""
        self._held[index, number] = (commit, Engine(codes.copy(), bits))

    def answer(
        self, index: str, number: int, commit: int, method: str, args: dict[str, Any]
    ) -> Any:
        """Call a method of the engine of a shard; None if it does not hold that commit."""
        held, engine = self._held.get((index, number), (None, None))
        return getattr(engine, method)(**args) if held == commit else None

    def drop(self, index: str) -> None:
        """Forget the shards of an index."""
        self._held = {key: held for key, held in self._held.items() if key[0] != index}


def _pool(count: int) -> list[Any]:
    """At least ``count`` actors, in turn on all nodes; a dead one is started again elsewhere."""
    with _lock:
        nodes: list[str] = []
        while len(_holders) < count:
            nodes = nodes or [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            near = NodeAffinitySchedulingStrategy(nodes[len(_holders) % len(nodes)], soft=True)
            _holders.append(start_actor(ShardHolder, num_cpus=0, scheduling_strategy=near))
        return list(_holders)


class Searched(NamedTuple):
    """What is searched: the codes of an index, by ascending id.

    Attributes:
        commit: the commit that left them.
        bits: length of a code.
        codes: (n, bytes) all of them.
        among: the positions of those to search; None for all.
    """

    commit: int
    bits: int
    codes: NDArray[np.uint8]
    among: NDArray[np.int64] | None


class Shards:
    """The shards of an index on a cluster: every one answers, or there is an error.

    Args:
        address: HOST:PORT of the cluster, with the options ``shards``; ``replicas``, actors that
            hold the same shard; ``timeout``, seconds to wait for an answer.
    """

    def __init__(self, address: ServerUri) -> None:
        options = address.options
        self._uri, self._timeout = address.shown, options["timeout"]
        self._count, self._replicas = options["shards"], options["replicas"]
        self._name, self._turn = uuid.uuid4().hex, 0
        self._sent: dict[tuple[int, int], int] = {}
        connect_ray(address.rest, address.shown)

    def call(self, searched: Searched, method: str, args: dict[str, Any]) -> list[tuple[int, Any]]:
        """Call a method of the engine of every shard.

        Returns:
            For every shard, where its positions begin, and what the method returned.
        """
        self._turn += 1
        deadline = time.monotonic() + self._timeout
        sent = [self._send(i, self._turn, searched, method, args) for i in range(self._count)]
        return [
            (self._bounds(i, searched)[0], self._answer(i, ref, deadline, searched, method, args))
            for i, ref in enumerate(sent)
        ]

    def _bounds(self, number: int, searched: Searched) -> tuple[int, int]:
        count = len(searched.codes)
        return count * number // self._count, count * (number + 1) // self._count

    def _send(
        self, number: int, turn: int, searched: Searched, method: str, args: dict[str, Any]
    ) -> Any:
        """Send a call, and before it the codes if that actor does not have them."""
        pool = _pool(max(self._count, self._replicas))
        holder = (number + turn % self._replicas) % len(pool)
        first, end = self._bounds(number, searched)
        among = searched.among
        if among is not None:
            among = among[slice(*np.searchsorted(among, [first, end]))] - first
        shard = (self._name, number, searched.commit)
        try:
            if self._sent.get((holder, number)) != searched.commit:
                self._sent[holder, number] = searched.commit
                pool[holder].load.remote(*shard, searched.codes[first:end], searched.bits)
            return holder, pool[holder].answer.remote(*shard, method, {**args, "among": among})
        except RayError as error:
            return holder, error

    def _answer(
        self,
        number: int,
        sent: tuple[int, Any],
        deadline: float,
        searched: Searched,
        method: str,
        args: dict[str, Any],
    ) -> Any:
        what = f"{self._uri}: shard {number + 1} of {self._count}"
        turn, reason = self._turn, "it did not answer in time"
        while (left := deadline - time.monotonic()) > 0:
            holder, ref = sent
            try:
                if isinstance(ref, RayError):
                    raise ref
                found = ray.get(ref, timeout=left)
                if found is not None:
                    return found
                # It was started again, or a search of another commit came between.
                self._sent.pop((holder, number), None)
            except RayTaskError as error:
                raise FisherhashError(f"{what} failed: {error.cause}") from error
            except GetTimeoutError:
                break
            except RayError as error:
                reason = str(error).splitlines()[0]
                if isinstance(error, RayActorError):
                    reason = f"its node or its process ended: {reason}"
                    # Another replica, or the same actor, which is started again elsewhere.
                    turn += 1
                if (turn - self._turn) % self._replicas == 0:
                    time.sleep(_PAUSE)
            sent = self._send(number, turn, searched, method, args)
        raise FisherhashError(
            f"{what} cannot be reached within {self._timeout} s ({reason}), so there is no "
            "complete answer. Add nodes, or replicas=2 to the URI, and try again"
        )

    def close(self) -> None:
        """Forget the shards on the cluster."""
        if ray.is_initialized():
            for holder in _holders:
                holder.drop.remote(self._name)
