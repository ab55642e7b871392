"""Reproducing a table: tuned, resumed, shared by processes, and with “not run” where it was not."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fisherhash import backbones
from fisherhash.errors import DivergedError, FisherhashError, NotDefinedError, UsageError
from fisherhash.evaluation.looking import neighbour_agreement
from fisherhash.experiments import cells, planning, specs, trials
from fisherhash.experiments.planning import make_plan
from fisherhash.experiments.reproduce import reproduce
from fisherhash.experiments.request import Request, parse_request
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.significance import unpack_shares
from fisherhash.experiments.winners import PACKAGED_TUNING, Choice, Winners
from fisherhash.system.options import Tuned, options_of
from fisherhash.training.settings import parse_settings


def runs(folder, kind="runs"):
    return sorted(path for path in Path(folder).glob(f"{kind}/**/*.json"))


def test_a_table_and_what_belongs_to_it(make_request):
    said = []
    outcome = reproduce(make_request(), say=said.append)
    assert (outcome.left, outcome.failed) == (0, {})
    # Two rows, each with and without the class step, which share a training.
    assert "2 of 2 runs left" in "".join(said)
    assert "not tuned on coco21-tiny-32-frozen-rehearsal" in "".join(said)
    table = outcome.table
    assert "| DPSH | " in table
    assert "[0.752] |" in table  # the paper's number beside ours
    assert "stand-in" in table
    assert "MISSES" not in table  # the paper's numbers are of other data
    folder = outcome.page.parent
    row = json.loads(runs(folder)[0].read_text())
    assert row["protocol"]["protocol"] == "coco21"
    assert len(row["protocol"]["checksum"]) == 64
    for key in ("evaluation", "real_queries"):
        assert {"map", "map_lower", "map_upper", "top", "ranking"} <= row[key].keys()
        values = unpack_shares(row[key]["average_precision"])
        assert np.nanmean(values) == pytest.approx(row[key]["map"], abs=1e-5)
    assert row["history"]["epoch"] == 1
    assert {"training", "measuring", "total"} <= row["seconds"].keys()
    stored = json.loads((folder / "table2.json").read_text())
    assert len(stored["parts"][0]["runs"]) == 4
    assert "average_precision" not in (folder / "table2.json").read_text()
    assert "<h1>" in outcome.page.read_text()
    before = {path: path.stat().st_mtime_ns for path in runs(folder)}
    again = reproduce(make_request(), say=said.append)
    assert said[-1] == "all 2 runs are done"
    assert again.results == outcome.results
    assert {path: path.stat().st_mtime_ns for path in runs(folder)} == before


def test_without_jinja2_the_report_is_markdown(make_request, monkeypatch):
    monkeypatch.setitem(sys.modules, "fisherhash.pages.html", None)
    said = []
    outcome = reproduce(make_request(only=["coco21", "12", "dpsh"]), say=said.append)
    assert outcome.page.name == "table2.md"
    assert "| DPSH | " in outcome.page.read_text()
    assert said[-1].startswith("no HTML page: ")


def test_unseen_classes_take_the_tuning_of_all_classes(make_request, tmp_path, monkeypatch):
    # The classes have a few images each.
    agree = functools.partial(neighbour_agreement, k=1)
    monkeypatch.setattr("fisherhash.experiments.cells.neighbour_agreement", agree)
    request = make_request(target="unseen")
    plan = planning.make_plan(request)
    (column,) = plan.columns
    seen = column.setup.with_all_classes
    assert (column.setup.protocol, seen.protocol) == ("coco21+unseen", "coco21")
    winner = {"options": {"margin": 3.0}, "settings": {"learning_rate": 0.07}}
    row = next(row for row in column.part.rows if row.space == "dfh-paper")
    known = {"winner": winner, "base": dict(row.base)}
    found = Winners({seen.slug: {"rows": {"dfh-paper": known}}}).choice(column.setup, row)
    assert found.settings == {"learning_rate": 0.07}
    outcome = reproduce(request, say=lambda _: None)
    assert (outcome.left, outcome.failed) == (0, {})
    run = json.loads(runs(outcome.page.parent)[0].read_text())
    assert run["protocol"]["protocol"] == "coco21+unseen"
    assert "5 of 21 classes are held out" in run["protocol"]["notes"][-2]
    agreement = run["evaluation"]["agreement"]
    assert agreement["queries"] > 0
    assert 0 <= agreement["value"] <= 1
    assert "| one code per class (chance) | " in outcome.table


@pytest.fixture
def quick_search(monkeypatch):
    """Without the cut, which takes seconds, and without rates at which training diverges."""
    for live in (False, True):
        monkeypatch.setitem(trials.LEARNING_RATES, live, Tuned(0.001, 0.02, "log"))
    for name in ("dpsh", "csq"):
        monkeypatch.setitem(specs.BASES, name, {"outputs": 0, "cut": "first"})


def test_fine_tuned_and_tuned_first(make_request, quick_search):
    said = []
    only = ["coco21", "12", "dpsh"]
    settings = {"epochs": 2, "head_epochs": 1, "batch_size": 32}
    request = make_request(tune=True, finetune=True, only=only, points=4, settings=settings)
    outcome = reproduce(request, say=said.append)
    assert (outcome.left, outcome.failed) == (0, {})
    folder = outcome.page.parent
    # Four points of one epoch, the best one of two and one near it, at two code lengths; one more
    # per round beyond an edge; and two to four with a classifier beside the head.
    trials = len(runs(folder, "trials"))
    assert trials in {16, 18, 20, 22, 24}
    (bench,) = json.loads((folder / "tuning.json").read_text())["benches"].values()
    assert bench["bench"]["finetune"]
    entry = bench["rows"]["dpsh"]
    assert 2 * len(entry["trials"]) == trials
    last = [trial for trial in entry["trials"] if trial["epochs"] == 2]
    winner, stepped = entry["winner"], entry["winner_step"]
    best = max(last, key=lambda trial: trial["plain"])
    best_step = max(last, key=lambda trial: trial["step"]["score"])
    assert winner["options"] == {"loss_scale": 1.0, **best["options"]}
    assert winner["settings"] == best["settings"]
    assert stepped["settings"] == best_step["settings"]
    # One training serves both rows where both were tuned to the same values.
    rows = [json.loads(path.read_text()) for path in runs(folder)]
    assert len(rows) == (1 if best is best_step else 2)

    def trained_as(one):
        (found,) = [
            row for row in rows if one["settings"].items() <= row["config"]["settings"].items()
        ]
        return found

    row, step_row = trained_as(winner), trained_as(stepped)
    for key, value in winner["options"].items():
        assert row["options"][key] == value
    assert step_row["config"]["settings"]["step_weight"] == stepped["class_step"]["weight"]
    plain, step = outcome.results["parts"][0]["runs"]
    assert (plain["row"], step["row"]) == ("DPSH", "DPSH + class step")
    assert plain["evaluation"]["map"] == pytest.approx(row["evaluation"]["map"], abs=1e-6)
    for key in ("evaluation", "real_queries"):
        assert step[key]["map"] == pytest.approx(step_row["class_step"][key]["map"], abs=1e-6)
    trial = json.loads(runs(folder, "trials")[0].read_text())
    assert "evaluation" not in trial  # queries are never looked at
    assert {step["score"] for step in trial["validation"]["steps"]} != {
        trial["validation"]["plain"]
    }
    taken = reproduce(make_request(finetune=True, only=only, settings=settings), say=said.append)
    assert taken.left == 0  # the winners of the folder are taken, nothing was left to run
    assert len(runs(folder)) == len(rows)


def test_a_search_alone_stops_and_continues(make_request, quick_search):
    given = {"tune": True, "points": 4, "only": ["coco21", "12", "csq"]}
    none = reproduce(make_request(**given, tune_only=True, minutes=0.0))
    assert none.left >= 8  # in a rehearsal of one epoch the second round repeats the first
    folder = none.page.parent
    assert not runs(folder, "trials")
    done = reproduce(make_request(**given, tune_only=True))
    assert (done.left, done.failed) == (0, {})
    assert not runs(folder)
    trials = {path: path.stat().st_mtime_ns for path in runs(folder, "trials")}
    assert len(trials) == 10
    whole = reproduce(make_request(**given))
    assert whole.left == 0
    assert {path: path.stat().st_mtime_ns for path in runs(folder, "trials")} == trials
    assert runs(folder)


def test_the_best_rows_get_more_seeds(make_request):
    given = {"seeds": 2, "first_seeds": 3, "only": ["coco21", "12", "dpsh", "cnnh"]}
    outcome = reproduce(make_request(**given))
    assert outcome.left == 0
    (part,) = outcome.results["parts"]
    best = {test["row"] for test in part["tests"]}
    seeds = {
        row["name"]: {run["seed"] for run in part["runs"] if run["row"] == row["name"]}
        for row in part["rows"]
    }
    assert {0, 1, 2} in seeds.values()
    for name in best:
        assert len(seeds[name]) >= 2
    assert all(found in ({0, 1}, {0, 1, 2}) for found in seeds.values())
    assert {test["ranking"] for test in part["tests"]} == {"evaluation", "real_queries"}
    assert all(test["queries"] > 0 for test in part["tests"])
    assert (
        reproduce(make_request(seeds=2, first_seeds=3, only=["coco21", "12", "dpsh", "cnnh"])).left
        == 0
    )


def test_the_command_line(make_request, capsys):
    from fisherhash.cli import main

    words = ["reproduce", "table2", "--rehearse", "--jobs", "1", "--device", "cpu"]
    words += ["--split-seed", "0"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--only", "coco21,12,dpsh", "--out", make_request().out])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert "| DPSH | " in printed.out
    assert "**0." in printed.out
    assert "table2.html" in printed.err
    with pytest.raises(SystemExit) as ended:
        main([*words, "--only", "coco22", "--out", make_request().out])
    assert ended.value.code == 2
    assert "does not know 'coco22'" in capsys.readouterr().err


def test_shared_by_two_processes(make_request, capfd):
    outcome = reproduce(make_request(only=["coco21", "12", "24", "dpsh", "dfh-paper"], jobs=2))
    assert outcome.left == 0
    said = capfd.readouterr().err
    assert said.count("validation") == 0
    assert said.count(" left\n") == 4  # one line a run: nothing was run twice
    assert len(runs(outcome.page.parent)) == 4
    assert {json.loads(path.read_text())["jobs"] for path in runs(outcome.page.parent)} == {2}


def test_a_killed_call_is_continued(make_request):
    command = [
        sys.executable,
        "-m",
        "fisherhash.experiments",
        *("table2", "--rehearse", "--jobs", "2", "--only", "coco21,dpsh,dfh-paper,dtsh"),
        *("--device", "cpu", "--split-seed", "0", "--out", make_request().out),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not runs(make_request().out) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = {path: path.read_text() for path in runs(make_request().out)}
    assert 1 <= len(done) < 12
    outcome = reproduce(make_request(only=["coco21", "dpsh", "dfh-paper", "dtsh"]))
    assert outcome.left == 0
    assert len(runs(make_request().out)) == 12
    for path, text in done.items():
        assert path.read_text() == text


def test_no_run_starts_after_the_time(make_request):
    outcome = reproduce(make_request(minutes=0.0))
    assert outcome.left == 2
    assert "not run [0.752]" in outcome.table
    assert reproduce(make_request()).left == 0


def shared_table(make_request, tmp_path, name, bits):
    """A table of rows whose lengths and class steps may share trainings, in its own folder."""
    entries = {
        "csq": {"outputs": 40, "cut": "between"},
        "dpsh": {"outputs": 40, "cut": "first"},
    }
    (column,) = make_plan(make_request()).columns
    rows = {
        space: {
            "trials": [],
            "space": {},
            "winner": {"options": {}, "settings": settings},
            "winner_step": {
                "options": {},
                "settings": {**settings, "cut": "between"},
                "class_step": {"weight": 2.0, "sharpness": 0.5},
            },
        }
        for space, settings in entries.items()
    }
    tuning = tmp_path / "tuning.json"
    tuning.write_text(json.dumps({"benches": {column.setup.slug: {"rows": rows}}}))
    only = ["coco21", *bits, "dpsh", "csq"]
    out = str(tmp_path / name)
    return make_request(only=only, out=out, tuning=str(tuning))


def test_rows_and_lengths_share_trainings_and_have_the_numbers_of_their_own(
    make_request, tmp_path, monkeypatch
):
    real, calls = cells.fit, []

    def counted(*arguments, **options):
        calls.append(len(options["endings"]))
        return real(*arguments, **options)

    monkeypatch.setattr(cells, "fit", counted)
    together = reproduce(shared_table(make_request, tmp_path, "together", ["12", "24"]))
    # CSQ: one row serves both, at two lengths; DPSH: two rows at two lengths.
    assert calls == [3, 1]
    assert (together.left, together.failed) == (0, {})
    alone = [
        reproduce(shared_table(make_request, tmp_path, f"alone{n}", [bits]))
        for n, bits in enumerate(["12", "24"])
    ]
    found = {(run["row"], run["bits"]): run for run in together.results["parts"][0]["runs"]}
    assert len(found) == 8
    for one in alone:
        for run in one.results["parts"][0]["runs"]:
            for ranking in ("evaluation", "real_queries"):
                assert found[run["row"], run["bits"]][ranking] == run[ranking]
    rows = [json.loads(path.read_text()) for path in runs(together.page.parent)]
    assert sorted(row["shared_by"] for row in rows) == [2, 2, 4, 4, 4, 4]


def test_a_part_of_what_shares_a_training_is_run_again_alone(make_request, tmp_path, monkeypatch):
    request = shared_table(make_request, tmp_path, "out", ["12", "24"])
    folder = reproduce(request).page.parent
    lost = next(path for path in runs(folder) if json.loads(path.read_text())["bits"] == 24)
    before = json.loads(lost.read_text())
    lost.unlink()
    real, calls = cells.fit, []

    def counted(*arguments, **options):
        calls.append(len(options["endings"]))
        return real(*arguments, **options)

    monkeypatch.setattr(cells, "fit", counted)
    assert reproduce(request).left == 0
    assert calls == [0]
    after = json.loads(lost.read_text())
    for key in ("evaluation", "real_queries", "config"):
        assert after[key] == before[key]


def test_an_ending_that_fails_leaves_the_others_alone(make_request, tmp_path, monkeypatch):
    """Now, in the next call, and in a search, where a trial that gave up is never tried again."""
    real = cells.measure_rankings

    def broken(trainings, *arguments, **options):
        if any(trained.hasher.bits == 24 for trained, _ in trainings):
            raise FisherhashError("logits hold NaN")
        return real(trainings, *arguments, **options)

    request = shared_table(make_request, tmp_path, "out", ["12", "24"])
    with monkeypatch.context() as patch:
        patch.setattr(cells, "measure_rankings", broken)
        for _ in range(2):
            outcome = reproduce(request)
            assert len(outcome.failed) == outcome.left == 3
            assert set(outcome.failed.values()) == {"logits hold NaN"}
    rows = [json.loads(path.read_text()) for path in runs(outcome.page.parent)]
    assert {row["bits"] for row in rows} == {12}
    assert reproduce(request).left == 0


def test_a_training_that_diverges_diverges_for_all_that_share_it(
    make_request, tmp_path, monkeypatch
):
    calls = []

    def diverging(*arguments, **options):
        calls.append(options["endings"])
        raise DivergedError("the loss became nan")

    monkeypatch.setattr(cells, "fit", diverging)
    outcome = reproduce(shared_table(make_request, tmp_path, "out", ["12", "24"]))
    assert len(outcome.failed) == outcome.left == 6
    assert len(calls) == 2


def test_what_one_of_several_cannot_have_the_others_get(make_request, tmp_path, monkeypatch):
    real = cells.fit

    def picky(*arguments, **options):
        lengths = {options["bits"], *(bits for bits, _ in options["endings"])}
        if 24 in lengths:
            raise NotDefinedError("not at 24 bits")
        return real(*arguments, **options)

    monkeypatch.setattr(cells, "fit", picky)
    outcome = reproduce(shared_table(make_request, tmp_path, "out", ["12", "24"]))
    assert (outcome.left, outcome.failed) == (0, {})
    rows = [json.loads(path.read_text()) for path in runs(outcome.page.parent)]
    assert {row["bits"] for row in rows if "evaluation" in row} == {12}
    assert {row["not_defined"] for row in rows if row["bits"] == 24} == {"not at 24 bits"}
    assert all(row["images"] for row in rows)


def test_a_failed_run_is_recorded_and_tried_again(make_request, monkeypatch):
    real = cells.fit

    def broken(*arguments, **options):
        if options["method"] == "dpsh":
            raise FisherhashError("the disk is full")
        return real(*arguments, **options)

    monkeypatch.setattr(cells, "fit", broken)
    outcome = reproduce(make_request())
    assert outcome.failed == {"coco21: DPSH 12 bits, seed 0": "the disk is full"}
    assert outcome.left == 1
    assert "| DPSH | failed" in outcome.table
    assert "DPSH, 12 bits: 1 run failed: the disk is full." in outcome.table
    monkeypatch.setattr(cells, "fit", real)
    healed = reproduce(make_request())
    assert (healed.left, healed.failed) == (0, {})


def test_calls_that_share_a_folder_do_not_try_each_other_s_failures_forever(
    make_request, monkeypatch
):
    tried = []

    def broken(*arguments, **options):
        tried.append(options["method"])
        raise FisherhashError("the disk is full")

    monkeypatch.setattr(cells, "fit", broken)
    plan = make_plan(make_request())
    calls = [
        Runner(make_request().folder, device=torch.device("cpu"), token=token) for token in "ab"
    ]
    for one in (*calls, *calls):
        one.run(plan.cells)
    assert len(tried) == 2 * len(plan.cells())


def test_an_error_that_breaks_the_device_ends_the_process_and_another_goes_on(
    make_request, monkeypatch, tmp_path
):
    from fisherhash.experiments import reproduce as module

    def broken(*arguments, **options):
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(cells, "fit", broken)
        outcome = reproduce(make_request(), say=said.append)
        assert (outcome.left, len(outcome.failed)) == (2, 2)  # the device works: both were tried
        patched.setattr(Runner, "_works", lambda self: False)
        outcome = reproduce(make_request(), say=said.append)
        assert sum("has broken the use of cpu" in line for line in said) == 1
        assert outcome.left == 2

    once = tmp_path / "once"
    first = f"import os, sys; os.path.exists({str(once)!r}) or (open({str(once)!r}, 'x').close(), "
    monkeypatch.setattr(module, "_BOOT", f"{first}sys.exit({module.BROKEN})); {module._BOOT}")
    said.clear()
    assert reproduce(make_request(jobs=2), say=said.append).left == 0
    assert said.count("another process takes its place") == 1


def test_other_images_are_not_mixed_in(make_request, monkeypatch):
    from fisherhash.experiments.cells import OpenSetup

    reproduce(make_request())
    real = OpenSetup.__init__

    def other(self, *arguments, **options):
        real(self, *arguments, **options)
        self.identity["images"] = "other"

    monkeypatch.setattr(OpenSetup, "__init__", other)
    with pytest.raises(UsageError, match="different images"):
        reproduce(make_request(seeds=2))


def test_data_that_is_missing_is_said(make_request):
    said = []
    outcome = reproduce(make_request(only=["dpsh", "12"]), say=said.append)
    assert any("CIFAR-10: not run, there is no cifar10" in line for line in said)
    assert "| DPSH | not run [0.713] |" in outcome.table
    with pytest.raises(UsageError, match=r"no data set of table2 is on this machine \(cifar10\)"):
        reproduce(make_request(only=["cifar10", "dpsh", "12"]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": "table9"}, "Did you mean"),
        ({"only": ["cocoo21"]}, "does not know 'cocoo21'"),
        ({"only": ["13"]}, "nothing of table2 is left"),
        ({"device": "cuda9"}, "cuda9"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
    ],
)
def test_bad_requests(make_request, changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        reproduce(make_request(**changes))


def test_settings_from_text():
    assert parse_settings(["head-epochs=3"]) == {"head_epochs": 3}
    for text, sentence in (
        ("epochs", "NAME=VALUE"),
        ("epoch=3", "Did you mean 'epochs'"),
        ("epochs=x", "must be a whole number"),
        ("dropout=x", "must be a number"),
        ("dropout=7", "between 0 and 0.99"),
    ):
        with pytest.raises(UsageError, match=sentence):
            parse_settings([text])


@pytest.mark.parametrize("finetune", [False, True])
def test_trials_may_be_shorter_than_the_table_s_runs(make_request, finetune):
    given = {"rehearse": False, "finetune": finetune, "only": ["coco21", "12"], "tune": True}
    plan = planning.make_plan(make_request(**given))
    (plain,) = plan.columns
    assert {search.settings for search in plan.tunings} == {plain.settings}
    plan = planning.make_plan(make_request(**given, trial_epochs=5, settings={"dropout": 0.1}))
    (column,) = plan.columns
    assert column.settings == dataclasses.replace(plain.settings, dropout=0.1)
    trial = dataclasses.replace(column.settings, epochs=5)
    assert {search.settings for search in plan.tunings} == {trial}
    with pytest.raises(UsageError, match="epochs must be between"):
        planning.make_plan(make_request(**given, trial_epochs=-1))
    for name, value in (("trial_epochs", 5), ("points", 8), ("tune_only", True)):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} needs a search"):
            planning.make_plan(make_request(**given | {"tune": False}, **{name: value}))


def test_more_images_have_fewer_epochs_of_the_whole_network(
    make_request, data_folder, tmp_path, monkeypatch
):
    shutil.copytree(data_folder / "coco21", tmp_path / "tiny100")
    monkeypatch.setenv("FISHERHASH_DATA", str(tmp_path))

    def epochs(target, data, **changes):
        request = make_request(target=target, only=[data], rehearse=False, **changes)
        (column,) = planning.make_plan(request).columns
        return column.settings.epochs

    assert epochs("table3", "tiny100", finetune=True) == 10
    assert epochs("table3", "tiny100", finetune=True, settings={"epochs": 7}) == 7
    assert epochs("table3", "tiny100", finetune=False) == 40
    assert epochs("table3", "tiny100", finetune=False, quick=True) == 15
    assert epochs("table2", "cifar10", finetune=True) == 20


def test_codes_without_a_hamming_distance_compete_with_real_valued_queries(make_request):
    outcome = reproduce(make_request(only=["coco21", "12", "dqn", "dfh-ours"], seeds=2))
    assert outcome.left == 0
    (part,) = outcome.results["parts"]
    # Like all tests over queries: the average precision of each of them is known for DQN, too.
    tests = [test for test in part["tests"] if "DQN" in (test["row"], test["other"])]
    assert {test["ranking"] for test in tests} == {"real_queries"}
    assert all(test["queries"] > 0 for test in tests)
    # No class step: the codes of DQN are no signs that it could change.
    names = ["DFH (ours)", "DFH (ours) + class step", "DQN"]
    assert [row["name"] for row in part["rows"]] == names
    found = {run["row"]: run for run in part["runs"]}
    for name in names[:2]:
        assert found[name]["evaluation"]["ranking"] == "Hamming distance"
        assert "head" in found[name]["real_queries"]["ranking"]
    assert "real_queries" not in found["DQN"]
    by_codes, real = outcome.table.split("Ranked by real-valued queries:")
    assert "| DQN ‡ | 0." in by_codes  # not bold: it does not compete
    assert "| DFH (ours) | " in real
    assert "| DQN ‡ | " in real


def test_the_first_layers_stay_fixed_where_the_whole_network_is_trained(make_request):
    def layers(**changes):
        plan = planning.make_plan(make_request(only=["coco21", "12"], tune=True, **changes))
        (column,) = plan.columns
        assert {search.settings for search in plan.tunings} == {column.settings}
        return column.settings.fixed_layers

    live = {"rehearse": False, "finetune": True}
    for backbone, count in (("efficientnet-lite0", 4), ("squeezenet1.0", 3)):
        assert layers(**live, backbone=backbone) == count
        assert layers(**live, backbone=backbone, settings={"fixed_layers": 0}) == 0
        backbones.create(backbone, pretrained=False).fix(count)
    assert layers(**live, backbone="alexnet") == 0
    assert layers(**live, backbone="alexnet", settings={"fixed_layers": 2}) == 2
    assert layers(rehearse=False, finetune=False) == 0
    assert layers(finetune=True) == 0  # a rehearsal's network is too small
    assert parse_settings(["fixed-layers=0"]) == {"fixed_layers": 0}


def test_a_rehearsal_has_a_network_of_its_own_whatever_the_weights(make_request):
    given = {"backbone": "squeezenet1.0", "weights": "squeezenet.safetensors"}
    for rehearse, wanted in ((True, ("tiny", None)), (False, tuple(given.values()))):
        setup = planning.make_plan(make_request(rehearse=rehearse, **given)).setups[0]
        assert (setup.backbone, setup.weights) == wanted


def test_what_makes_a_row_wins_over_what_was_tuned():
    row = specs.MARGIN_ROWS[0]
    choice = Choice({"margin": 2.0, "quantization": 0.3}, {"learning_rate": 0.1})
    fixed = specs.PRINTED
    rest = {"quantization": 0.3, "learning_rate": 0.1}
    assert planning.row_values(row, choice) == {**fixed, "margin": 0, **rest}
    pair = specs.TABLE1.parts[0].rows[0]
    found = planning.row_values(pair, choice)
    assert found == {**fixed, "margin": 2.0, **rest, "parts": "pair,margin"}


def test_packaged_tunings_name_benches_that_exist():
    found = Winners.load(PACKAGED_TUNING).benches
    for slug, bench in found.items():
        assert bench["bench"]["finetune"] == ("finetuned" in slug)


def test_another_split_seed_is_another_bench(make_request):
    slugs = {
        seed: planning.make_plan(make_request(split_seed=seed)).setups[0].slug for seed in (0, 1)
    }
    assert slugs[0] == "coco21-tiny-32-frozen-rehearsal"  # as before there were others
    assert slugs[1] == "coco21-seed1-tiny-32-frozen-rehearsal"


def test_words_become_a_request():
    words = "table2 --only coco21,12 --frozen --seeds 2 --minutes 1.5 --set epochs=3 --json"
    words += " --tune --tune-only --points 32 --trial-epochs 5 --split-seed 0 --first-seeds 4"
    request, as_json = parse_request(words.split(), command="x")
    assert as_json
    assert request == Request(
        target="table2",
        only=["coco21", "12"],
        finetune=False,
        seeds=2,
        minutes=1.5,
        settings={"epochs": 3},
        tune=True,
        tune_only=True,
        points=32,
        trial_epochs=5,
        split_seed=0,
        first_seeds=4,
    )
    assert request.folder == Path("reproduce-table2")
    plain, as_json = parse_request(["table1"], command="x")
    assert (plain, as_json) == (Request(target="table1"), False)
    assert plain.backbone == backbones.DEFAULT
    assert parse_request(["table1", "--finetune"], command="x")[0].finetune is True


def test_quick_takes_the_shortest_and_the_longest_codes(make_request):
    given = {"rehearse": False, "quick": True}
    (column,) = planning.make_plan(make_request(**given, only=["coco21"])).columns
    assert column.part.bits == (12, 48)
    assert len(column.part.rows[0].paper) == 2
    (column,) = planning.make_plan(make_request(**given, only=["coco21", "24"])).columns
    assert column.part.bits == (24,)


def test_a_request_travels_as_json():
    request = Request(target="table2", only=("a", "b"), settings={"epochs": 3}, finetune=True)
    again = Request(**json.loads(json.dumps(dataclasses.asdict(request))))
    assert dataclasses.replace(again, only=tuple(again.only)) == request


def test_help_lists_every_option_with_its_text(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_request(["--help"], command="fisherhash reproduce")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("-\n", "-").split())
    assert shown.startswith("usage: fisherhash reproduce [OPTIONS] TARGET")
    for one in options_of(Request):
        flag = {"target": "TARGET", "settings": "--set"}.get(one.name, one.flag)
        assert flag in shown
        assert one.help
        assert one.help.replace(" ", "") in shown.replace(" ", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "required: TARGET"),
        (["table2", "table3"], "one TARGET is expected, got also 'table3'"),
        (["table2", "--quik"], "Unknown option: --quik. Did you mean --quick?"),
        (["table2", "--jobs", "1.5"], "--jobs must be a whole number, got '1.5'"),
        (["table2", "--minutes", "x"], "--minutes must be a number, got 'x'"),
        (["table2", "--finetune", "--frozen"], "not allowed with"),
        (["table2", "--set", "epoch=3"], "Did you mean 'epochs'"),
        (["table22"], "Did you mean 'table2'"),
    ],
)
def test_bad_words_are_a_sentence_and_exit_code_2_in_both_commands(words, sentence, capsys):
    from fisherhash.cli import main
    from fisherhash.experiments.__main__ import main as bare

    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *words])
    assert (ended.value.code, bare(words)) == (2, 2)
    captured = capsys.readouterr()
    one, other = captured.err.splitlines()
    assert one == other
    assert one.startswith("fisherhash: ")
    assert sentence in one
    assert captured.out == ""
