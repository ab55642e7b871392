"""Reports: the best in bold, what is within its error, and the paper's numbers we miss."""

import json
import math

import pytest

from fisherhash.experiments import report
from fisherhash.experiments.standing import Score, Standing
from fisherhash.experiments.tables import Table, TableCell, dump_results


def part(rows, *, bits=(12,), stands_in=False, paper=None):
    """Rows by name: mAP of each seed."""
    made = {
        "data": "cifar10",
        "title": "CIFAR-10",
        "stands_in": stands_in,
        "bits": list(bits),
        "seeds": 3,
        "settings": {"epochs": 30},
        "bench": {"backbone": "b", "image_size": 128, "finetune": True},
        "protocol": {
            "protocol": "cifar10-small",
            "top": None,
            "train": 5000,
            "query": 1000,
            "database": 59000,
            "checksum": "0" * 64,
        },
        "rows": [],
        "runs": [],
    }
    for name, values in rows.items():
        method = "dfh" if name.startswith("DFH") else "other"
        numbers = [paper] * len(bits) if paper else []
        made["rows"].append({"name": name, "method": method, "tuned": True, "paper": numbers})
        for seed, value in enumerate(values):
            evaluation = {"map": value, "map_stable": value, "map_lower": None, "map_upper": None}
            made["runs"].append(
                {"row": name, "bits": 12, "seed": seed, "device": "d", "evaluation": evaluation}
            )
    return made


def results(made, target="table2"):
    return {
        "target": target,
        "title": "A table",
        "of": "paper",
        "kind": "table",
        "notes": [],
        "parts": [made],
        "tuning": {},
    }


def table(made):
    return report.part_report(results(made), made).table.markdown()


def intro(made):
    return report.part_report(results(made), made).intro


def verdicts(made, target="table2"):
    return Standing(made).verdicts(target)


def test_one_table_as_markdown_and_as_html():
    made = Table(
        ["a & b", "12"], [["<i>", TableCell(" (1–2)", strong="1.5")], ["x", "–"]], "A note."
    )
    assert made.markdown().splitlines() == [
        "| a & b | 12 |",
        "|---|---|",
        "| <i> | **1.5** (1–2) |",
        "| x | – |",
        "",
        "A note.",
    ]
    html = made.html()
    assert '<th scope="col">a &amp; b</th>' in html
    assert '<tr><th scope="row">&lt;i&gt;</th><td><b>1.5</b> (1–2)</td></tr>' in html
    assert html.endswith("<p>A note.</p>")


def test_results_as_json_have_one_line_per_run_and_short_value():
    made = results(part({"DFH": [0.5, 0.6], "other": [0.4]}))
    made["parts"][0]["runs"][0]["options"] = {f"option {n}": n for n in range(40)}
    text = dump_results(made)
    assert json.loads(text) == made
    assert text.endswith("}\n")
    assert sum(line.strip().startswith('{"row": ') for line in text.splitlines()) == 3
    assert '      "bits": [12],\n' in text


def test_the_best_is_bold_and_what_is_within_its_error_is_marked():
    made = part({"DFH": [0.80, 0.82, 0.84], "near": [0.80, 0.81, 0.82], "far": [0.5, 0.5, 0.5]})
    lines = {line.split(" |")[0]: line for line in table(made).splitlines()}
    assert "**0.820** (0.800–0.840)" in lines["| DFH"]
    assert "0.810 †" in lines["| near"]
    assert "†" not in lines["| far"]


def test_standard_errors():
    score = Score((0.1, 0.2, 0.3))
    assert score.error == pytest.approx(0.1 / math.sqrt(3))
    assert Score((0.1,)).error == 0.0
    assert math.isnan(Score().mean)


@pytest.mark.parametrize(
    ("values", "stands_in", "sentence"),
    [
        ([0.9, 0.9, 0.9], False, "12 bits: DFH is best; it reaches the paper's 0.850."),
        ([0.8, 0.8, 0.8], False, "3.0 points behind other; it MISSES the paper's 0.850 by 5.0"),
        ([0.8, 0.8, 0.8], True, "DFH is 3.0 points behind other."),
        (
            [0.80, 0.82, 0.84],
            False,
            "is within the combined standard error of the best, other",
        ),
    ],
)
def test_verdicts(values, stands_in, sentence):
    made = part({"DFH": values, "other": [0.83, 0.83, 0.83]}, stands_in=stands_in, paper=0.85)
    said, *below = verdicts(made)
    assert sentence in said
    missed = [] if stands_in else ["Below the paper's own number: other at 12 bits (-2.0 points)."]
    assert below == missed


def test_the_best_row_says_who_is_within_its_error_and_how_many_seeds_it_has():
    made = part({"DFH": [0.83, 0.85, 0.87], "near": [0.82, 0.85, 0.86], "far": [0.7, 0.7, 0.7]})
    (said,) = verdicts(made)
    assert "12 bits: DFH is best; within the combined standard error: near." in said
    made["runs"] = [run for run in made["runs"] if run["row"] != "DFH" or run["seed"]]
    (said,) = verdicts(made)
    assert f"({len(made['runs']) - 6} of {made['seeds']} seeds)" in said


def test_table_1_s_order():
    made = part({"DFH a": [0.5, 0.5], "DFH b": [0.6, 0.6], "DFH c": [0.7, 0.7]})
    (said,) = verdicts(made, "table1")
    assert "order is reproduced (steps of +10.0, then +10.0 points)" in said
    made = part({"DFH a": [0.5, 0.5], "DFH b": [0.4, 0.4], "DFH c": [0.7, 0.7]})
    (said,) = verdicts(made, "table1")
    assert "NOT reproduced" in said


def test_not_run_and_not_defined():
    made = part({"DFH": [], "never": []})
    made["runs"] = [{"row": "never", "bits": 12, "seed": 0, "device": "d", "not_defined": "no"}]
    lines = table(made).splitlines()
    assert lines[2] == "| DFH | not run |"
    assert lines[3] == "| never | – |"
    assert report.html_page(results(made)).count("not run") == 2
    assert report.markdown(results(made)).count("not run") == 2


def test_text_of_others_is_escaped():
    made = part({"DFH": [0.5], "<b>": [0.4]})
    page = report.html_page(results(made))
    assert "&lt;b&gt;" in page
    assert "<b>0.500</b>" in page


def test_real_valued_queries_are_a_row_beside_the_contest_of_the_codes():
    rows = {
        "DFH": [0.86, 0.87, 0.88],
        "DFH, real-valued queries": [0.90, 0.90, 0.91],
        "product": [0.88, 0.88, 0.88],
        "other": [0.5, 0.5, 0.5],
    }
    made = part(rows, bits=(12, 24))  # nothing ran at 24 bits
    made["rows"][1]["real_queries_of"] = "DFH"
    for run in made["runs"]:
        if run["row"] in ("DFH, real-valued queries", "product"):
            run["evaluation"]["ranking"] = "distance of the head"
    text = table(made)
    assert "| DFH, real-valued queries ‡ | 0.903" in text
    assert "| product ‡ | **0.880**" in text  # the best of those that compete
    assert "do not compete" in text
    assert verdicts(made) == [
        "12 bits: DFH is 1.0 points behind product, and best of the rows ranked by Hamming "
        "distance; with real-valued queries, as in product, it has 0.903, 2.3 points ahead of "
        "product."
    ]


def test_failed_runs_are_called_failed_and_why():
    made = part({"DFH": [0.9, 0.9, 0.9], "other": []})
    for seed in range(3):
        reason = {"row": "other", "bits": 12, "seed": seed, "failed": "the loss became nan"}
        made["runs"].append(reason)
    assert "| other | failed |" in table(made)
    assert "on d." in intro(made)
    said = verdicts(made)
    assert said[-1] == "other, 12 bits: 3 runs failed: the loss became nan."


def test_what_failed_is_said_in_every_table():
    failed = [{"row": "pair", "bits": 12, "seed": s, "failed": "no memory"} for s in range(3)]
    made = part({"pair": [], "pair + intra": []})
    made["runs"] = failed
    made["protocol"] = None
    assert intro(made) == "Every run failed."
    for target in ("table1", "table2", "figures"):
        assert verdicts(made, target) == ["pair, 12 bits: 3 runs failed: no memory."]
    made["runs"] = []
    assert intro(made) == "Not run yet."


def test_few_seeds_are_said_of_the_codes():
    made = part({"DFH": [0.8, 0.8], "DFH, real": [0.9, 0.9], "product": [0.7, 0.7, 0.7]})
    made["rows"][1]["real_queries_of"] = "DFH"
    for run in made["runs"][2:]:
        run["evaluation"]["ranking"] = "distance of the head"
    (said,) = verdicts(made)
    assert "DFH is best (2 of 3 seeds); with real-valued queries, as in product" in said
