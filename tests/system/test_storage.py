"""Files are whole or not there, and a damaged one is named in a sentence."""

import os
import subprocess
import sys

import pytest
import torch

from fisherhash.errors import FisherhashError
from fisherhash.system import storage

TENSORS = {
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.empty(0, 5),
}


def write_two(folder, word):
    storage.write_files(folder, {name: f"{word} {name}" for name in ("one", "two")})


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_are_written_in_a_folder_that_is_made(tmp_path):
    write_two(tmp_path / "new" / "folder", "first")
    assert contents(tmp_path / "new" / "folder") == {"one": "first one", "two": "first two"}


def test_a_failure_in_the_last_file_leaves_the_old_ones(tmp_path):
    write_two(tmp_path, "old")

    def fail(path):
        path.write_text("half of")
        raise OSError(28, os.strerror(28))

    with pytest.raises(FisherhashError, match=r"No space left on device\. Nothing there was"):
        storage.write_files(tmp_path, {"one": "new one", "two": fail})
    assert contents(tmp_path) == {"one": "old one", "two": "old two"}


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FisherhashError, match="could not write"):
        write_two(tmp_path / "file" / "folder", "any")
    assert contents(tmp_path) == {"file": "in the way"}


def test_a_real_limit_on_file_sizes_leaves_the_old_files(tmp_path, run_limited):
    """The second file does not fit; nothing of the first is seen either."""
    write_two(tmp_path, "old")
    script = """
        import sys
        from pathlib import Path
        from fisherhash.system import storage
        from fisherhash.errors import FisherhashError
        files = {"one": "new", "two": b"x" * 5000}
        try:
            storage.write_files(Path(sys.argv[1]), files)
        except FisherhashError as error:
            sys.exit(str(error))
    """

    done = run_limited(4096, script, tmp_path)
    assert done.returncode == 1
    assert "File too large. Nothing there was changed" in done.stderr
    assert contents(tmp_path) == {"one": "old one", "two": "old two"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, FisherhashError])
def test_any_failure_of_a_writer_removes_the_drafts(tmp_path, error):
    write_two(tmp_path, "old")

    def fail(path):
        path.write_text("half of")
        raise error

    with pytest.raises(error):
        storage.write_files(tmp_path, {"one": "new one", "two": fail})
    with pytest.raises(error):
        storage.write_file(tmp_path / "one", fail)
    assert contents(tmp_path) == {"one": "old one", "two": "old two"}


def test_one_file_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    for content in ("text", b"bytes", lambda draft: draft.write_text("written")):
        storage.write_file(path, content)
    assert contents(path.parent) == {"file": "written"}
    storage.write_file(os.fspath(path), os.fsdecode(b"\xff"))
    assert path.read_bytes() == b"\xff"


def test_one_file_that_cannot_be_written(tmp_path):
    write_two(tmp_path, "old")

    def fail(path):
        path.write_text("half of")
        raise OSError(28, os.strerror(28))

    with pytest.raises(FisherhashError, match=r"could not write .*one: No space left on device"):
        storage.write_file(tmp_path / "one", fail)
    (tmp_path / "sub").mkdir()
    with pytest.raises(FisherhashError, match=r"sub is a folder; give the name"):
        storage.write_file(tmp_path / "sub", "text")
    with pytest.raises(FisherhashError, match="could not write"):
        storage.write_file(tmp_path / "one" / "below a file", "text")
    (tmp_path / "sub").rmdir()
    assert contents(tmp_path) == {"one": "old one", "two": "old two"}


def test_a_folder_appears_when_it_is_complete(tmp_path):
    place = tmp_path / "new" / "place"
    with storage.draft_folder(place) as draft:
        (draft / "file").write_text("text")
        assert not place.exists()
        assert draft.parent == place.parent
    assert contents(place) == {"file": "text"}
    assert list(place.parent.iterdir()) == [place]


def test_an_empty_folder_is_replaced_and_a_full_one_is_not(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    with storage.draft_folder(place) as draft:
        (draft / "file").write_text("first")
    with pytest.raises(FileExistsError, match="place exists already"), storage.draft_folder(place):
        pass
    assert contents(place) == {"file": "first"}
    assert list(tmp_path.iterdir()) == [place]


def test_a_failure_leaves_no_folder(tmp_path):
    def fail():
        with storage.draft_folder(tmp_path / "place") as draft:
            (draft / "file").write_text("half of")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_killed_processes_are_removed_and_those_of_running_ones_are_not(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
    left = tmp_path / f".place.{int(ended.stdout)}-1f.new"
    running = tmp_path / f".place.{os.getpid()}-1f.new"
    other = tmp_path / f".else.{int(ended.stdout)}-1f.new"
    for folder in (left, running, other):
        folder.mkdir()
    storage.remove_old_drafts(tmp_path / "place")
    assert sorted(tmp_path.iterdir()) == sorted([running, other])
    os.utime(running, (1, 1))
    with storage.draft_folder(tmp_path / "place"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "place", other])


@pytest.mark.parametrize("module", ["storage", "devices", "cache", "cores", "progress", "version"])
def test_no_torch_is_imported(module):
    code = f"import sys, fisherhash.system.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_come_back_as_they_were(tmp_path):
    tensors = TENSORS | {"turned": TENSORS["weight"].T}
    storage.write_files(tmp_path, {"t": storage.write_tensors(tensors)})
    found = storage.read_tensors(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_flip_in_any_byte_of_the_header_and_every_cut_is_an_error_of_ours(tmp_path):
    """Or, where the flip only renames a tensor or its type, other tensors: never a crash."""
    path = tmp_path / "t"
    storage.write_files(tmp_path, {"t": storage.write_tensors(TENSORS)})
    data = path.read_bytes()
    checksum = storage.tensors_checksum(TENSORS)
    header = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for byte in range(header):
        path.write_bytes(flipped(data, byte * 8 + byte % 8))
        try:
            found = storage.read_tensors(path)
        except FisherhashError as error:
            refused += str(path) in str(error)
        else:
            refused += storage.tensors_checksum(found) != checksum
    assert refused == header
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        with pytest.raises(FisherhashError, match="damaged or truncated"):
            storage.read_tensors(path)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def test_a_missing_file_and_a_folder_in_its_place(tmp_path):
    for read in (storage.read_tensors, storage.read_json):
        with pytest.raises(FisherhashError, match="none is missing"):
            read(tmp_path / "none")
        with pytest.raises(FisherhashError, match="cannot be read: it is not a regular file"):
            read(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b'{"a": "\xff"}'])
def test_json_that_is_no_object(tmp_path, text):
    (tmp_path / "c.json").write_bytes(text)
    with pytest.raises(FisherhashError, match=r"c\.json is damaged"):
        storage.read_json(tmp_path / "c.json")


def test_json_round_trip_with_names_in_any_script_and_in_none(tmp_path):
    value = {"classes": ["Übung", "写真", os.fsdecode(b"\xff\xfe")], "n": 1.5}
    storage.write_files(tmp_path, {"c": storage.dump_json(value)})
    assert storage.read_json(tmp_path / "c") == value
    assert "Übung" in storage.dump_json({"classes": ["Übung"]})


@pytest.mark.gpu
def test_the_tensors_checksum_does_not_depend_on_the_device():
    images = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    tensors = TENSORS | {"images": images.to(memory_format=torch.channels_last)}
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert storage.tensors_checksum(moved) == storage.tensors_checksum(tensors)


def test_the_tensors_checksum_knows_names_types_shapes_and_values_but_no_order():
    base = storage.tensors_checksum(TENSORS)
    assert storage.tensors_checksum(dict(reversed(TENSORS.items()))) == base
    weight = TENSORS["weight"]
    changed = [
        {"renamed": weight},
        {"weight": weight.double()},
        {"weight": weight.reshape(4, 3)},
        {"weight": weight + 1e-6},
        {"weight": weight.view(torch.int32)},
    ]
    seen = {base}
    for change in changed:
        others = {k: v for k, v in TENSORS.items() if k != "weight"}
        seen.add(storage.tensors_checksum(others | change))
    assert len(seen) == 1 + len(changed)
    strided = weight.repeat(1, 2)[:, ::2].contiguous().T.contiguous().T
    same = storage.tensors_checksum({"weight": strided})
    assert same == storage.tensors_checksum({"weight": strided.contiguous()})
