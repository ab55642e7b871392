"""Rows that stay on disk: their order, reading ahead, damaged rows."""

import numpy as np
import pytest
import torch

from fisherhash.data.computing import Rows
from fisherhash.data.row_cache import RowCache, StoredRows
from fisherhash.data.streaming import ResidentRows, StreamedRows
from fisherhash.errors import FisherhashError

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def stored(folder, count=40, shape=(2, 3)):
    """Row i holds i * 10 + 0, 1, … as floats; the training set is every other one, backwards."""
    cache = RowCache(folder, count, shape, np.float32)
    size = int(np.prod(shape))
    values = np.arange(count)[:, None] * 10.0 + np.arange(size)
    rows = values.reshape(count, *shape).astype(np.float32)
    cache.store(Rows(rows, np.arange(count), []))
    numbers = np.arange(count)[::-2].copy()
    return StoredRows(cache, numbers), torch.from_numpy(rows[numbers])


def test_the_order_is_that_of_rows_in_memory(tmp_path):
    rows, values = stored(tmp_path)
    found = StreamedRows(rows).order(generator())
    assert torch.equal(found, ResidentRows(values).order(generator()))
    assert sorted(found.tolist()) == list(range(20))


@pytest.mark.parametrize("ahead_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("share", [slice(0, 4), slice(1, 3)])
def test_steps_have_their_rows_at_hand(tmp_path, ahead_bytes, share):
    rows, values = stored(tmp_path)
    streamed = StreamedRows(rows, ahead_bytes=ahead_bytes)
    assert len(streamed) == 20
    order = streamed.order(generator()).view(5, 4)
    seen = []
    for index in streamed.steps(order, share, CPU):
        seen.append(index)
        assert torch.equal(streamed.at(index[share], CPU), values[index[share]])
    assert torch.equal(torch.stack(seen), order)
    # Outside of steps, any rows.
    assert torch.equal(streamed.at(torch.tensor([3, 0]), CPU), values[[3, 0]])
    assert torch.equal(streamed.between(2, 5, CPU), values[2:5])


def test_a_selection_reads_nothing(tmp_path):
    rows, _ = stored(tmp_path)
    (tmp_path / "rows.bin").write_bytes(b"")
    some = rows[np.arange(20) % 3 == 0]
    assert len(some) == 7
    assert (some.row_shape, some.dtype, some.row_bytes) == ((2, 3), np.float32, 24)


def test_a_damaged_row_is_an_error_and_computed_again(tmp_path):
    rows, _ = stored(tmp_path)
    with (tmp_path / "rows.bin").open("rb+") as file:
        file.seek(39 * 24 + 3)
        file.write(b"\xff")
    streamed = StreamedRows(rows)
    with pytest.raises(FisherhashError, match=r"row 39 of the cache .* is damaged; run"):
        streamed.between(0, 2, CPU)
    cache = RowCache(tmp_path, 40, (2, 3), np.float32)
    assert cache.missing(np.arange(40), check=False).tolist() == [39]


def test_an_error_of_a_reader_ends_the_steps(tmp_path):
    rows, _ = stored(tmp_path)
    with (tmp_path / "rows.bin").open("rb+") as file:
        file.write(b"\xff" * 40 * 24)
    streamed = StreamedRows(rows)
    with pytest.raises(FisherhashError, match="is damaged"):
        list(streamed.steps(torch.arange(20).view(5, 4), slice(0, 4), CPU))


def test_steps_can_be_left(tmp_path):
    rows, values = stored(tmp_path)
    streamed = StreamedRows(rows, ahead_bytes=100)
    steps = streamed.steps(torch.arange(20).view(5, 4), slice(0, 4), CPU)
    next(steps)
    steps.close()
    assert torch.equal(streamed.at(torch.tensor([7, 0, 1, 2]), CPU), values[[7, 0, 1, 2]])


def test_a_device_has_the_rows_at_one_place_in_all_epochs(tmp_path):
    """A captured CUDA graph reads them there."""
    rows, _ = stored(tmp_path)
    streamed, device = StreamedRows(rows, ahead_bytes=100), torch.device("meta")
    places = []
    for epoch in range(2):
        order = streamed.order(generator(epoch)).view(5, 4)
        for index in streamed.steps(order, slice(0, 4), device):
            places.append(streamed.at(index, device))
    assert len(places) == 10
    assert all(place is places[0] for place in places)
    assert places[0].device.type == "meta"
