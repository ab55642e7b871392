"""Backups: consistent beside a writer, incremental, and a complete index at every moment."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from textwrap import dedent

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.local.backup import backup_index

BITS, WIDTH = 64, 8


def codes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, WIDTH), dtype=np.uint8)


def content(path):
    with Index.open(path) as index:
        notes = {kind: index.notes(kind) for kind in ("sync", "round")}
        return {item.id: item for item in index.items()}, notes, index.info()["next_id"]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.index"
    with Index.create(path, bits=BITS, fingerprint="f" * 64, model={"method": "none"}) as index:
        index.add(
            [Entry(f"{i}.jpg", code, metadata={"n": i}) for i, code in enumerate(codes(400))],
            notes={"sync": {"folder": {"folder": "/data"}}},
        )
        index.add_codes(codes(3000, 1))
        index.update(Entry(f"{i}.jpg", code) for i, code in enumerate(codes(50, 2)))
        index.remove(ids=range(1000, 1100))
    return path


def change(path, round_):
    with Index.open(path, write=True) as index:
        index.add_codes(codes(500, 10 + round_))
        index.add([Entry(f"new {round_}", codes(1, round_)[0])])
        index.update([Entry("7.jpg", codes(1, 99 + round_)[0], labels=[f"{round_}"])])


def test_a_backup_is_the_index(source, tmp_path):
    report = backup_index(source, tmp_path / "b")
    assert content(tmp_path / "b") == content(source)
    assert Index.examine(tmp_path / "b") == []
    with Index.open(source) as index:
        info = index.info()
    assert (report.commit, report.count) == (info["commit"], info["count"])
    assert (report.copied, report.kept) == (info["bytes"]["codes"], 0)
    assert json.loads(json.dumps(report.to_json()))["incremental"] is False
    with Index.open(tmp_path / "b", write=True) as index:
        index.add_codes(codes(3))


def test_only_new_bytes_are_copied(source, tmp_path):
    whole = backup_index(source, tmp_path / "b").copied
    change(source, 0)
    report = backup_index(source, tmp_path / "b")
    # 501 new codes, and one updated code with its id.
    assert (report.copied, report.kept) == (502 * WIDTH + 8, whole)
    assert report.incremental
    assert content(tmp_path / "b") == content(source)
    assert Index.examine(tmp_path / "b") == []
    again = backup_index(source, tmp_path / "b")
    assert (again.copied, again.commit) == (0, report.commit)


def test_a_backup_follows_a_compaction(source, tmp_path):
    backup_index(source, tmp_path / "b")
    with Index.open(source, write=True) as index:
        index.compact()
    backup_index(source, tmp_path / "b")
    assert content(tmp_path / "b") == content(source)
    assert Index.examine(tmp_path / "b") == []
    names = {path.name for path in (tmp_path / "b" / "codes").iterdir()}
    assert names == {path.name for path in (source / "codes").iterdir()}


def test_an_index_as_a_killed_writer_left_it(source, tmp_path):
    script = f"""
        import os, sys
        import numpy as np
        from fisherhash.index import Index
        index = Index.open({str(source)!r}, write=True)
        index.add_codes(np.zeros((5, 8), np.uint8))
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", dedent(script)], check=True)
    assert (source / "catalogue.sqlite-wal").exists()
    backup_index(source, tmp_path / "b")
    assert content(tmp_path / "b") == content(source)
    assert not (tmp_path / "b" / "catalogue.sqlite-wal").exists()
    assert Index.examine(tmp_path / "b") == []


def test_its_model_comes_along(tmp_path):
    def save(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    Index.create(tmp_path / "a", bits=8, model={"method": "x"}, save_model=save).close()
    backup_index(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/model/config.json").read_text() == "{}"


def test_what_is_refused(source, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(UsageError, match="not a backup of an index"):
        backup_index(source, tmp_path / "other")
    with pytest.raises(UsageError, match="is the index itself"):
        backup_index(source, source)
    with pytest.raises(UsageError, match="does not exist"):
        backup_index(tmp_path / "none", tmp_path / "b")
    backup_index(source, tmp_path / "b")
    with Index.open(tmp_path / "b", write=True) as index:
        with pytest.raises(FisherhashError, match="is being written by"):
            backup_index(source, tmp_path / "b")
        index.update([Entry("3.jpg", labels=["mine"])])
    with pytest.raises(UsageError, match="was changed after it was made"):
        backup_index(source, tmp_path / "b")
    assert content(tmp_path / "b")[0][3].labels == ("mine",)


def test_a_backup_of_another_history_is_refused(source, tmp_path):
    """Two copies of one index went on differently."""
    shutil.copytree(source, tmp_path / "twin")
    change(source, 0)
    backup_index(source, tmp_path / "b")
    change(tmp_path / "twin", 1)
    change(tmp_path / "twin", 2)
    expected = content(tmp_path / "b")
    with pytest.raises(UsageError, match="another index, or of a state that"):
        backup_index(tmp_path / "twin", tmp_path / "b")
    with Index.create(tmp_path / "new", bits=BITS) as index:
        index.add_codes(codes(9))
    with pytest.raises(UsageError, match="another index, or of a state that"):
        backup_index(tmp_path / "new", tmp_path / "b")
    assert content(tmp_path / "b") == expected
    assert Index.examine(tmp_path / "b") == []


def test_a_damaged_index_leaves_the_earlier_backup_alone(source, tmp_path):
    backup_index(source, tmp_path / "b")
    expected = content(tmp_path / "b")
    change(source, 0)
    file = max(source.glob("codes/*.codes"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(FisherhashError, match=r"\.codes is damaged: block 0.*index repair"):
        backup_index(source, tmp_path / "b")
    assert content(tmp_path / "b") == expected
    assert Index.examine(tmp_path / "b") == []
    with pytest.raises(FisherhashError, match="is damaged"):
        backup_index(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_damage_in_the_backup_is_healed_by_the_next_one(source, tmp_path):
    backup_index(source, tmp_path / "b")
    change(source, 0)
    file = max((tmp_path / "b").glob("codes/*.codes"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    backup_index(source, tmp_path / "b")
    assert content(tmp_path / "b") == content(source)
    assert Index.examine(tmp_path / "b") == []


KILLED = """
import itertools, os, signal, sys
left = itertools.count(1)
point = int(sys.argv[1])

def guarded(function):
    def call(*arguments, **named):
        if next(left) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call

from fisherhash.index.local import backup
for name in ("fsync", "ftruncate", "replace", "unlink", "write", "mkdir"):
    setattr(os, name, guarded(getattr(os, name)))
backup.backup_index(sys.argv[2], sys.argv[3])
print("done")
"""


def killed_backups(source, tmp_path, points):
    """Kill a backup at some of its system calls; whether one came to its end."""
    old, new = tmp_path / "old", content(source)
    backup_index(source, old)
    before = content(old)
    change(source, 0)
    new = content(source)
    for point in points:
        path = tmp_path / f"b{point}"
        shutil.copytree(old, path)
        run = [sys.executable, "-c", KILLED, str(point), str(source), str(path)]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL or done.stdout == "done\n", done.stderr
        assert content(path) in (before, new), point
        assert [p for p in Index.examine(path) if "harmless" not in p.todo] == [], point
        backup_index(source, path)
        assert content(path) == new
        assert Index.examine(path) == []
        shutil.rmtree(path)
        if done.returncode == 0:
            return True
    return False


def test_killed_anywhere_it_is_the_earlier_backup_or_the_new_one(source, tmp_path):
    killed_backups(source, tmp_path, (2, 9, 14, 19))


@pytest.mark.slow
def test_killed_everywhere(source, tmp_path):
    assert killed_backups(source, tmp_path, itertools.count(1))


WRITER = """
import sys
import numpy as np
from fisherhash.index import Entry, Index
rng = np.random.default_rng(0)
with Index.open(sys.argv[1], write=True) as index:
    print("ready", flush=True)
    kept = []
    for n in range(10**9):
        some = rng.integers(0, 256, (40, 8), dtype=np.uint8)
        # Every commit states how many items it leaves.
        count = len(index)
        if n % 25 == 24:
            index.compact()
        elif n % 5 == 4:
            # All but ten of the latest, so that the index grows no larger with time.
            gone, kept = kept[:-10], kept[-10:]
            index.remove(gone, notes={"round": {"count": count - len(gone)}})
        else:
            entries = [Entry(f"n {n} {i}", c, metadata={"n": n}) for i, c in enumerate(some)]
            index.add(entries, notes={"round": {"count": count + len(entries)}})
            kept += [entry.key for entry in entries]
"""


def backups_beside_a_writer(source, tmp_path, count):
    """Backups while another process commits all the time; every one must be consistent."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(source)], stdout=subprocess.PIPE, text=True
    )
    commits = []
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        while len(commits) < count:
            dest = tmp_path / f"backup {len(commits) % 3}"
            report = backup_index(source, dest)
            assert Index.examine(dest) == []
            items, notes, _ = content(dest)
            assert len(items) == report.count == notes["round"].get("count", report.count)
            commits.append(report.commit)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    return commits


def test_backups_beside_a_busy_writer(source, tmp_path):
    commits = backups_beside_a_writer(source, tmp_path, 10)
    assert commits == sorted(commits)
    assert len(set(commits)) > 3
