"""The long tests, for a quiet machine: python tests/soak.py [--mutations N --items N --backups N].

10,000 mutated folders, damage and repair of an index of a million items, backups beside a busy
writer. Prints a summary, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent / "index" / "local"
sys.path.insert(0, str(HERE))

BLOCK = 4096


def soak_mutations(root, count):
    """Mutated folders, in one process per core."""
    workers = os.cpu_count() or 1
    each = -(-count // workers)
    seed = int.from_bytes(os.urandom(3), "little")
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "fuzzing.py"), str(seed + n * each), str(each)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(workers)
    ]
    problems, outcomes = [], {}
    for process in running:
        out, _ = process.communicate()
        *found, last = out.splitlines() or ["nothing was printed", "{}"]
        problems += found
        for name, number in json.loads(last).get("outcomes", {}).items():
            outcomes[name] = outcomes.get(name, 0) + number
        if process.returncode:
            problems.append(f"a fuzzing process ended with {process.returncode}")
    return problems, {"first seed": seed, "mutations": sum(outcomes.values()), **outcomes}


def make_large(path, count):
    """An index of ``count`` items: nine of ten with a key, some updated, some removed."""
    import numpy as np

    from fisherhash.index import Entry, Index

    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (count, 8), dtype=np.uint8)
    keyed = count * 9 // 10
    with Index.create(path, bits=64) as index:
        for start in range(0, keyed, 100_000):
            part = range(start, min(start + 100_000, keyed))
            index.add(
                Entry(f"album {i % 97}/photo {i}.jpg", codes[i], f"/photos/{i}.jpg", i, i)
                for i in part
            )
        index.add_codes(codes[keyed:])
        index.update(
            Entry(f"album {i % 97}/photo {i}.jpg", codes[-i - 1]) for i in range(0, keyed, 1000)
        )
        index.remove(ids=range(5, count, count // 500))


def contents(path):
    """Ids, codes and keys, compactly."""
    from fisherhash.index import Index

    with Index.open(path) as index:
        codes = {
            id_: code.tobytes()
            for ids, block in index.scan()
            for id_, code in zip(ids.tolist(), block, strict=True)
        }
        return codes, {state.id: key for key, state in index.files().items()}


def soak_repair(root, count):
    """Damage single blocks of every kind of file; what does not lie in them must be there."""
    from fisherhash.index.local.repair import repair_index

    from fisherhash.index import Index

    source = root / "large"
    make_large(source, count)
    codes, keys = contents(source)
    rng = random.Random(os.urandom(8))
    problems, lost_most, seconds = [], {}, []
    files = [p for p in source.rglob("*") if p.is_file() and p.name != "lock"]
    cases = [(p, b) for p in files for b in {0, rng.randrange(-(-p.stat().st_size // BLOCK) or 1)}]
    rng.shuffle(cases)
    # Large files first, and not more cases than fit into some minutes.
    cases.sort(key=lambda case: -case[0].stat().st_size)
    for path, block in cases[:8]:
        name = path.relative_to(source).as_posix()
        data = path.read_bytes()
        changed = bytearray(data)
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        changed[part] = rng.randbytes(len(changed[part]))
        path.write_bytes(changed)
        out = root / "repaired"
        start = time.monotonic()
        report = repair_index(source, out)
        seconds.append(time.monotonic() - start)
        path.write_bytes(data)
        lost = {item.id for item in report.lost}
        lost |= {i for first, last in report.lost_codes for i in range(first, last + 1)}
        if contents(out) != (
            {i: code for i, code in codes.items() if i not in lost},
            {i: key for i, key in keys.items() if i not in lost},
        ):
            problems.append(f"{name} block {block}: what is left is not what was there")
        if len(lost) > BLOCK // 8:
            problems.append(f"{name} block {block}: {len(lost)} items lost")
        if wrong := Index.examine(out):
            problems.append(f"{name} block {block}: {wrong[0]}")
        lost_most[name] = max(lost_most.get(name, 0), len(lost))
        shutil.rmtree(out)
    shutil.rmtree(source)
    times = {"repairs": len(seconds), "seconds each, at most": round(max(seconds), 1)}
    return problems, {"items": len(codes), **times, "lost at most": lost_most}


def soak_backups(root, count):
    """Backups beside a writer that commits all the time."""
    import numpy as np
    import test_backup

    from fisherhash.index import Index

    source = root / "busy"
    with Index.create(source, bits=64) as index:
        index.add_codes(np.random.default_rng(0).integers(0, 256, (100_000, 8), dtype=np.uint8))
    start = time.monotonic()
    try:
        commits = test_backup.backups_beside_a_writer(source, root, count)
    except AssertionError as error:
        return [f"a backup is not consistent: {error}"], {}
    seconds = round(time.monotonic() - start, 1)
    found = {"backups": len(commits), "different commits": len(set(commits)), "seconds": seconds}
    return [], found


PARTS = {"mutations": soak_mutations, "items": soak_repair, "backups": soak_backups}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, most in (("mutations", 10_000), ("items", 1_000_000), ("backups", 200)):
        parser.add_argument(f"--{name}", type=int, default=most, help=f"default {most:,}; 0: none")
    wanted = vars(parser.parse_args())
    wrong = 0
    for name, part in PARTS.items():
        if not wanted[name]:
            continue
        with tempfile.TemporaryDirectory(prefix="fisherhash-soak-") as root:
            start = time.monotonic()
            problems, summary = part(Path(root), wanted[name])
        for problem in problems[:50]:
            print(problem)
        wrong += len(problems)
        seconds = time.monotonic() - start
        print(f"{name}: {summary}; {len(problems)} problems, {seconds:.0f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{'nothing was wrong' if not wrong else f'{wrong} problems'}; peak memory {peak:,} MiB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
