"""The results: table, JSON, re-ranking, bit statistics, peers, plots."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import (
    compat,
    describe_bits,
    evaluate,
    metrics,
    plot,
)


@pytest.fixture
def case():
    rng = np.random.default_rng(7)
    centres = rng.integers(0, 2, (4, 12))
    classes = [rng.integers(0, 4, n) for n in (20, 300)]
    codes = [
        np.packbits((centres[c] ^ (rng.random((len(c), 12)) < 0.2)) > 0, axis=1) for c in classes
    ]
    return (*codes, *(np.eye(4, dtype=int)[c] for c in classes))


def test_the_table_names_what_it_shows(case):
    text = str(evaluate(*case, bits=12, top=100, empty="zero"))
    for line in (
        "mAP@100 (expected)",
        "lower bound",
        "P@10",
        "mAP within radius 2",
        "distinct codes",
        "denominator of AP",
        "found",
        "(counted as 0)",
    ):
        assert line in text
    assert "mAP@ALL (stable)" in str(evaluate(*case, bits=12, ties="stable"))
    unbounded = dataclasses.replace(evaluate(*case, bits=12), map_lower=None)
    assert "not available" in str(unbounded)


def test_json_holds_plain_numbers(case):
    result = evaluate(*case, bits=12, graded=True)
    values = json.loads(json.dumps(result.to_json()))
    assert values["map"] == result.map == result.map_expected
    assert values["precision_at"]["10"] == result.precision_at[10]
    assert values["bit_statistics"]["distinct_codes"] == values["distinct_codes"]
    assert "average_precision" not in values
    assert np.nanmean(result.average_precision) == pytest.approx(result.map)
    assert (result.queries, result.database, result.bits, result.top) == (20, 300, 12, 300)


def test_single_label_data_has_no_graded_metrics_unless_asked(case):
    plain, graded = evaluate(*case, bits=12), evaluate(*case, bits=12, graded=True)
    assert plain.weighted_map is plain.acg_at is plain.ndcg_at is None
    assert graded.weighted_map == pytest.approx(graded.map)
    assert graded.acg_at == pytest.approx(graded.precision_at)


def test_blocks_may_be_tensors_and_of_any_size(case):
    query, database, query_labels, database_labels = case
    distances = np.bitwise_count(query[:, None] ^ database[None]).sum(axis=2)
    tensors = torch.from_numpy(distances.astype(np.float32)).split(3)
    result = metrics(tensors, query_labels, database_labels, top=50)
    assert result.map == pytest.approx(evaluate(*case, bits=12, top=50).map)


@pytest.mark.parametrize("bits", [1, 9, 64, 100])
def test_bit_statistics_against_numpy(bits):
    rng = np.random.default_rng(bits)
    values = rng.random((500, bits)) < np.linspace(0.2, 0.8, bits)
    values[:, 0] = values[:, -1]
    stats = describe_bits(np.packbits(values, axis=1), bits)
    share = values.mean(axis=0)
    assert stats.balance == pytest.approx(share)
    assert stats.entropy == pytest.approx(
        -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    )
    assert stats.distinct_codes == len(np.unique(values, axis=0))
    if bits > 1:
        off = np.abs(np.corrcoef(values.T))[~np.eye(bits, dtype=bool)]
        assert stats.mean_correlation == pytest.approx(off.mean())
        assert stats.max_correlation == pytest.approx(1.0)


def field_loop(distances, relevant, ranks, kind):
    """The evaluator that the field passes around, in its own few lines; None without a hit."""
    ranked = relevant[np.argsort(distances, kind=kind)]
    hits = np.flatnonzero(ranked[:ranks]) + 1
    return (np.arange(1, len(hits) + 1) / hits).mean() if len(hits) else None


@pytest.mark.parametrize(("kind", "field"), [(None, "map"), ("stable", "map_stable")])
@pytest.mark.parametrize("top", [None, 3])
def test_peers(case, kind, field, top):
    query, database, query_labels, database_labels = case
    query_labels = query_labels.copy()
    query_labels[4] = 0
    distances = np.bitwise_count(query[:, None] ^ database[None]).sum(axis=2).astype(np.float32)
    relevant = query_labels @ database_labels.T > 0
    values = [field_loop(d, r, top or 300, kind) for d, r in zip(distances, relevant, strict=True)]
    found = [v for v in values if v is not None]
    arguments = (query, database, query_labels, database_labels)

    def printed(name):
        return getattr(compat(name, *arguments, bits=12, top=top), field)

    assert printed("hashnet") == pytest.approx(np.mean(found))
    assert printed("dfh") == pytest.approx(np.sum(found) / 20)
    dropped = [
        field_loop(d, r, top or 299, kind) or 0 for d, r in zip(distances, relevant, strict=True)
    ]
    assert printed("swuxyj") == pytest.approx(np.mean(dropped))
    reference = evaluate(
        *arguments, bits=12, top=top, ties="stable", empty="zero", denominator="min(K, relevant)"
    )
    if kind == "stable":
        assert printed("dsh-analysis") == pytest.approx(reference.map)
    else:
        assert reference.map_lower <= printed("dsh-analysis") <= reference.map_upper


def test_peers_name_their_rules(case):
    result = compat("swuxyj", *case, bits=12)
    assert result.last_item_dropped
    assert result.ranks == 299
    assert "unstable" in result.sort
    assert "unstable" in str(result)
    assert "last item dropped" in str(result)
    assert json.loads(json.dumps(result.to_json()))["map"] == result.map
    assert not compat("swuxyj", *case, bits=12, top=300).last_item_dropped
    with pytest.raises(UsageError, match="only one"):
        compat("swuxyj", [[0]], [[0]], [[1]], [[1]])


@pytest.mark.parametrize("kind", ["pr", "pr-radius", "precision", "recall", "distances"])
def test_plots(case, tmp_path, kind):
    result = evaluate(*case, bits=12)
    svg = plot({"a": result, "b": result}, tmp_path / "sub" / "x.svg", kind=kind, title="t")
    assert b"<svg" in svg.read_bytes()
    assert plot(result, tmp_path / "x.png", kind=kind).read_bytes().startswith(b"\x89PNG")
    again = plot({"a": result, "b": result}, tmp_path / "y.svg", kind=kind, title="t")
    assert again.read_bytes() == svg.read_bytes()


def test_plots_that_cannot_be_drawn(case, tmp_path, monkeypatch):
    result = evaluate(*case, bits=12)
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        plot(result, tmp_path / "x.pdf")
    with pytest.raises(UsageError, match="Did you mean 'distances'"):
        plot(result, tmp_path / "x.png", kind="distance")
    with pytest.raises(UsageError, match="no evaluation"):
        plot({}, tmp_path / "x.png")
    real = metrics([np.arange(300.0)[None]], case[2][:1], case[3])
    with pytest.raises(UsageError, match="needs Hamming distances; 'dqn' has none"):
        plot({"dqn": real}, tmp_path / "x.png", kind="distances")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FisherhashError, match=r"pip install 'fisherhash\[plots\]'"):
        plot(result, tmp_path / "x.png")
