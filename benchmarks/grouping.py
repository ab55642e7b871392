"""Times the grouping of likely duplicates, at codes alone: pairs, groups, and again after more.

    python benchmarks/grouping.py [--codes 1000000] [--bits 64] [--radius R] [--json FILE]

The collection is 70 % random codes, 20 % changed copies of some of them (up to 6 bits of 64
flipped), and 10 % that share 20 codes, as images of a collapsed code do. The radius is the default
one unless it is given. The second run has 1 % more codes and queries only these.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import pack
from fisherhash.index import Index
from fisherhash.index.images import grouping
from fisherhash.index.images.duplicate_search import DuplicateSearch
from fisherhash.index.images.grouping import Chance
from fisherhash.system.cores import available_cores


def make(
    count: int, bits: int, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Codes (count, bytes), for each the number of its original, and how far it is from it."""
    rng = np.random.default_rng([seed, bits])
    heavy, copies = count // 10, count // 5
    plain = count - heavy - copies
    rows = rng.integers(0, 2, (plain, bits), dtype=np.uint8)
    of = rng.integers(0, plain, copies)
    flips = rng.integers(0, max(1, bits * 6 // 64) + 1, copies)
    order = rng.random((copies, bits)).argsort(axis=1)
    changed = rows[of] ^ (order < flips[:, None])
    shared = rng.integers(0, 20, heavy)
    middle = rng.integers(0, 2, (20, bits), dtype=np.uint8)
    codes = pack(np.concatenate([rows, changed, middle[shared]]))
    truth = np.concatenate([np.arange(plain), of, plain + shared])
    distance = np.concatenate([np.zeros(plain, np.int64), flips, np.zeros(heavy, np.int64)])
    mixed = rng.permutation(count)
    return codes[mixed], truth[mixed], distance[mixed]


def measure(count: int, bits: int, radius: int | None) -> dict[str, Any]:
    """One full run and one with 1 % more codes."""
    codes, truth, distance = make(count + count // 100, bits)
    with tempfile.TemporaryDirectory() as folder:
        index = Index.create(Path(folder) / "i", bits=bits)
        index.add_codes(codes[:count])
        began = time.perf_counter()
        chance = Chance(grouping.distinct_codes(codes[:count])[0], bits)
        radius = chance.radius() if radius is None else radius
        found = DuplicateSearch(index).groups(radius)
        first = time.perf_counter() - began
        index.add_codes(codes[count:])
        began = time.perf_counter()
        again = DuplicateSearch(index).groups(radius)
        second = time.perf_counter() - began
        index.close()
    group = np.full(count, -1)
    mixed = 0
    for number, one in enumerate(found):
        group[one.ids] = number
        mixed += len(np.unique(truth[one.ids])) > 1
    originals = {int(t): i for i, t in enumerate(truth[:count]) if distance[i] == 0}
    near = [i for i in range(count) if 0 < distance[i] <= radius and int(truth[i]) in originals]
    together = sum(group[i] >= 0 and group[i] == group[originals[int(truth[i])]] for i in near)
    return {
        "codes": count,
        "bits": bits,
        "radius": radius,
        "comparisons_per_false_pair": 1 / max(chance.rate(radius), 1e-300),
        "seconds": round(first, 2),
        "seconds_with_1_percent_more": round(second, 2),
        "groups": len(found),
        "groups_with_1_percent_more": len(again),
        "largest_group": max((len(one.ids) for one in found), default=0),
        "mixed_groups": mixed,
        "copies_within_the_radius": len(near),
        "of_them_with_their_original": int(together),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description="Group many codes.")
    parser.add_argument("--codes", type=int, default=1_000_000)
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("--radius", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    grouping.FEWEST_REMEMBERED = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FISHERHASH_CACHE"] = cache
        # Compiling is not grouping.
        measure(5000, options.bits, 4)
        result = measure(options.codes, options.bits, options.radius)
    result |= {"cores": available_cores(), "machine": platform.processor() or platform.machine()}
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
