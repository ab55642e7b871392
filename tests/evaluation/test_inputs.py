"""Bad input: one clear sentence each."""

from __future__ import annotations

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import (
    compat,
    describe_bits,
    evaluate,
    evaluate_reranked,
    metrics,
    rerank,
)

CODES = np.zeros((3, 2), dtype=np.uint8)
LABELS = np.eye(3, dtype=np.uint8)


def bad(sentence, *arguments, call=evaluate, error=UsageError, **options):
    with pytest.raises(error, match=sentence) as caught:
        call(*arguments, **options)
    assert type(caught.value) is error


def test_codes_that_do_not_fit():
    bad(
        "query codes have 2 bytes and database codes 3",
        CODES,
        np.zeros((3, 3), np.uint8),
        LABELS,
        LABELS,
    )
    bad(r"must have shape \(n, 1\)", CODES, CODES, LABELS, LABELS, bits=8)
    bad("must be zero", CODES + 1, CODES, LABELS, LABELS, bits=12)
    bad("query codes must have shape", CODES[0], CODES, LABELS, LABELS)
    bad("codes must be uint8", CODES * 0.5, CODES, LABELS, LABELS)


def test_labels_that_do_not_fit():
    bad("query labels have 3 classes and database labels 2", CODES, CODES, LABELS, LABELS[:, :2])
    bad(r"query labels must be a 0/1 matrix.*numpy.eye", CODES, CODES, [0, 1, 2], LABELS)
    bad("database labels must hold only 0 and 1", CODES, CODES, LABELS, LABELS * 2)
    bad("database labels must hold only 0 and 1", CODES, CODES, LABELS, LABELS * np.nan)
    bad("2 rows of query labels for 3 query items", CODES, CODES, LABELS[:2], LABELS)


def test_nothing_to_rank():
    bad("the database is empty", CODES, CODES[:0], LABELS, LABELS[:0])
    bad("there are no queries", CODES[:0], CODES, LABELS[:0], LABELS)
    bad("the database is empty", [], LABELS, LABELS[:0], call=metrics)
    bad("no codes", CODES[:0], 16, call=describe_bits)


@pytest.mark.parametrize("empty", ["skip", "zero"])
def test_no_query_with_a_relevant_item(empty):
    other = np.array([[0, 0, 1]] * 3)
    bad(
        "none of the 2 queries has a relevant item",
        CODES[:2], CODES, LABELS[:2], other, empty=empty, error=FisherhashError,
    )  # fmt: skip


@pytest.mark.parametrize("top", [0, -1, 4, 1.5, True])
def test_top_out_of_range(top):
    bad("top must be", CODES, CODES, LABELS, LABELS, top=top)
    bad("top must be", [np.zeros((3, 3))], LABELS, LABELS, top=top, call=metrics)


def test_other_arguments():
    bad(
        "top must be between 1 and the database size 3, got 9",
        CODES,
        CODES,
        LABELS,
        LABELS,
        precision_at=[9],
    )
    bad("a radius must be a whole number from 0 to 16", CODES, CODES, LABELS, LABELS, radius=[17])
    bad(
        "unknown ties 'expectd'. Did you mean 'expected'",
        CODES,
        CODES,
        LABELS,
        LABELS,
        ties="expectd",
    )
    bad("unknown denominator 'fund'", CODES, CODES, LABELS, LABELS, denominator="fund")
    bad("unknown empty 'skp'", CODES, CODES, LABELS, LABELS, empty="skp")
    bad("unknown backend 'nump'", CODES, CODES, LABELS, LABELS, backend="nump")
    bad("self_index must be 3 whole numbers", CODES, CODES, LABELS, LABELS, self_index=[0])
    bad("self_index holds 3", CODES, CODES, LABELS, LABELS, self_index=[0, 1, 3])
    bad(
        "unknown evaluator 'hashnt'. Did you mean 'hashnet'",
        "hashnt",
        CODES,
        CODES,
        LABELS,
        LABELS,
        call=compat,
    )


def test_nan_is_named_with_its_place():
    distances = np.zeros((3, 3))
    distances[2, 1] = np.nan
    bad(
        "distance of query 2 to database row 1 is NaN",
        [distances[:1], distances[1:]], LABELS, LABELS, call=metrics, error=FisherhashError,
    )  # fmt: skip
    logits = np.ones((3, 4))
    logits[1, 0] = np.nan
    bad(
        "logits hold NaN in 1 row, the first is row 1",
        logits, np.ones((3, 4)), LABELS, LABELS, call=evaluate_reranked, error=FisherhashError,
    )  # fmt: skip
    bad("NaN", distances, distances, call=rerank, error=FisherhashError)


def test_blocks_that_do_not_fit():
    bad(r"must have shape \(b, 3\)", [np.zeros((3, 2))], LABELS, LABELS, call=metrics)
    bad("2 rows of distances for 3 queries", [np.zeros((2, 3))], LABELS, LABELS, call=metrics)
    bad("more rows than the 3 queries", [np.zeros((4, 3))], LABELS, LABELS, call=metrics)
    bad("must be numbers", [np.full((3, 3), "a")], LABELS, LABELS, call=metrics)
    bad(
        "query logits have 2 bits",
        np.ones((3, 2)),
        np.ones((3, 4)),
        LABELS,
        LABELS,
        call=evaluate_reranked,
    )
