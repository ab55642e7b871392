"""Bad input: one clear sentence each."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import compat, describe_bits, metrics
from fisherhash.evaluation import evaluate as every_argument

CODES = np.zeros((3, 2), dtype=np.uint8)
LABELS = np.eye(3, dtype=np.uint8)
NAN = np.array([[0.0, 0, 0], [np.nan, 0, 0], [0, 0, 0]])
evaluate = partial(every_argument, CODES, CODES, LABELS, LABELS)
codes = partial(every_argument, query_labels=LABELS, database_labels=LABELS)
labels = partial(every_argument, CODES, CODES)
distances = partial(metrics, query_labels=LABELS, database_labels=LABELS)

CASES = [
    ("query codes have 2 bytes and database codes 3", codes, (CODES, np.zeros((3, 3), np.uint8))),
    (r"must have shape \(n, 1\)", partial(codes, bits=8), (CODES, CODES)),
    ("must be zero", partial(codes, bits=12), (CODES + 1, CODES)),
    ("query codes must have shape", codes, (CODES[0], CODES)),
    ("codes must be uint8", codes, (CODES * 0.5, CODES)),
    ("query labels have 3 classes and database labels 2", labels, (LABELS, LABELS[:, :2])),
    (r"query labels must be a 0/1 matrix.*numpy.eye", labels, ([0, 1, 2], LABELS)),
    ("database labels must hold only 0 and 1", labels, (LABELS, LABELS * 2)),
    ("database labels must hold only 0 and 1", labels, (LABELS, LABELS * np.nan)),
    ("2 rows of query labels for 3 query items", labels, (LABELS[:2], LABELS)),
    ("the database is empty", every_argument, (CODES, CODES[:0], LABELS, LABELS[:0])),
    ("there are no queries", every_argument, (CODES[:0], CODES, LABELS[:0], LABELS)),
    ("the database is empty", metrics, ([], LABELS, LABELS[:0])),
    ("no codes", describe_bits, (CODES[:0], 16)),
    ("top must be between 1 and the database size 3", partial(evaluate, precision_at=[9]), ()),
    ("a radius must be a whole number from 0 to 16", partial(evaluate, radius=[17]), ()),
    ("unknown ties 'expectd'. Did you mean 'expected'", partial(evaluate, ties="expectd"), ()),
    ("unknown denominator 'fund'", partial(evaluate, denominator="fund"), ()),
    ("unknown empty 'skp'", partial(evaluate, empty="skp"), ()),
    ("unknown backend 'nump'", partial(evaluate, backend="nump"), ()),
    ("device 'cpu' needs backend 'torch'", partial(evaluate, backend="numpy", device="cpu"), ()),
    ("self_index must be 3 whole numbers", partial(evaluate, self_index=[0]), ()),
    ("self_index holds 3", partial(evaluate, self_index=[0, 1, 3]), ()),
    ("Did you mean 'hashnet'", compat, ("hashnt", CODES, CODES, LABELS, LABELS)),
    (r"must have shape \(b, 3\)", distances, ([np.zeros((3, 2))],)),
    ("2 rows of distances for 3 queries", distances, ([np.zeros((2, 3))],)),
    ("more rows than the 3 queries", distances, ([np.zeros((4, 3))],)),
    ("must be numbers", distances, ([np.full((3, 3), "a")],)),
]


@pytest.mark.parametrize(("sentence", "call", "arguments"), CASES, ids=[c[0] for c in CASES])
def test_bad_use_is_named(sentence, call, arguments):
    with pytest.raises(UsageError, match=sentence):
        call(*arguments)


@pytest.mark.parametrize("top", [0, -1, 4, 1.5, True])
def test_top_out_of_range(top):
    for call in (evaluate, partial(distances, [np.zeros((3, 3))])):
        with pytest.raises(UsageError, match="top must be"):
            call(top=top)


@pytest.mark.parametrize("empty", ["skip", "zero"])
def test_no_query_with_a_relevant_item(empty):
    other = np.array([[0, 0, 1]] * 3)
    with pytest.raises(FisherhashError, match="none of the 2 queries has a relevant item"):
        every_argument(CODES[:2], CODES, LABELS[:2], other, empty=empty)


def test_nan_is_named_with_its_row():
    with pytest.raises(FisherhashError, match="distance of query 1 to database row 0 is NaN"):
        distances([NAN[:1], NAN[1:]])
