"""Tuning: the same points for every process, the best quarter trained longer, the best one wins."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Annotated

import pytest

from fisherhash import methods
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.experiments import specs, trials, tuning
from fisherhash.experiments.cells import Setup
from fisherhash.experiments.planning import make_plan
from fisherhash.experiments.reproduce import reproduce
from fisherhash.experiments.request import ROUNDS
from fisherhash.experiments.specs import Row
from fisherhash.experiments.tuning import Tuning
from fisherhash.experiments.winners import Winners, recorded_trials
from fisherhash.methods import base
from fisherhash.system.options import Range, Tuned, options_of
from fisherhash.training import class_step
from fisherhash.training.settings import Settings

SETUP = Setup("cifar10", "cifar10-small", image_size=128)
FINETUNED = dataclasses.replace(SETUP, finetune=True)
SETTINGS = Settings(epochs=20)
GREEDY = Row("Greedy Hash", "greedyhash")
RESULTS = Path(__file__).resolve().parents[2] / "results" / "tuning-seed1.json"
ROWS = {row.space: row for spec in specs.SPECS.values() for part in spec.parts for row in part.rows}


class Done:
    """Stands for a runner whose trials have these scores; None is still to do, NaN diverged."""

    def __init__(self, plain, step=None):
        self.plain, self.step = plain, step

    def row(self, cell):
        value = self.plain(cell)
        if value is None:
            return None
        if math.isnan(value):
            return {"gave_up": "the loss became nan"}
        steps = [] if self.step is None else self.step(cell)
        return {"validation": {"plain": value, "steps": steps}}

    def failure(self, cell):
        return None

    def ended(self, cell):
        return self.row(cell) is not None or self.failure(cell) is not None

    def identity(self, setup, cells):
        return None


NOTHING = Done(lambda cell: None)


def near(cell):
    """Best at a rate of 0.03, better with more epochs and more bits."""
    rate = abs(math.log(cell.settings.learning_rate / 0.03))
    return cell.settings.epochs / 100 + cell.bits / 1000 - rate


def steps(cell):
    """One step that is best at high rates, and one that hurts."""
    rate = cell.settings.learning_rate
    return [
        {"weight": 1.0, "sharpness": 0.5, "score": 2 + math.log(rate)},
        {"weight": 2.0, "sharpness": 0.5, "score": -9.0},
    ]


def search(row=GREEDY, setup=SETUP, **changes):
    return Tuning(row, setup, SETTINGS, (12, 48), **changes)


def numbers(found, runner, **options):
    """The rounds that look for numbers: the first, the second, the third, those beyond an edge."""
    return list(dataclasses.replace(found, last_round="numbers").rounds(runner, **options))


def ways(found, runner, **options):
    """The round that tries every way to make bits."""
    return [*dataclasses.replace(found, last_round="cuts").rounds(runner, **options)][-1]


def beside(found, runner, **options):
    """The rounds with a classifier beside the head."""
    before = dataclasses.replace(found, last_round="cuts").trials(runner, **options)
    return found.trials(runner, **options)[len(before) :]


def score(trial, runner):
    return trial.result(runner)["plain"]


def point_of(trial):
    return {**trial["settings"], **trial["options"]}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("finetune", [False, True])
def test_every_row_gets_as_many_points_within_the_declared_ranges(name, finetune):
    row = ROWS[name]
    found = search(row, FINETUNED if finetune else SETUP)
    names = {one.name for one in found.space}
    declared = {one.name for one in options_of(methods.find(row.method)) if one.tuned}
    assert "learning_rate" in names
    assert names >= declared - {*row.base, *row.idle}
    assert not names & {*row.base}
    assert len(found.drawn) == tuning.POINTS
    assert len({json.dumps(point) for point in found.drawn}) == tuning.POINTS
    for one in found.space:
        values = [point[one.name] for point in found.drawn]
        if one.tuned.choices:
            assert set(values) <= set(one.tuned.choices)
        else:
            assert all(one.tuned.least <= value <= one.tuned.most for value in values)
            shares = sorted(one.tuned.share(value) for value in values)
            # A method's own options are at their defaults, or guesses, in every second point.
            spread = 0.25 if one.name == "learning_rate" else 0.4
            assert shares[0] < spread
            assert shares[-1] > 1 - spread
            if one.name in declared:
                default = methods.hyper_parameters(methods.find(row.method))[one.name].default
                default = row.guess.get(one.name, default)
                if not one.tuned.choices or default in one.tuned.choices:
                    assert [*values[::2]] == [default] * (tuning.POINTS // 2)
        if one.kind is int:
            assert all(isinstance(value, int) for value in values)
    first = numbers(found, NOTHING)[0]
    assert {len(trial.cells) for trial in first} == {2}
    for trial in first:
        cell = trial.cells[0]
        options = {**trials.parted(row.base)["options"], **cell.options}
        methods.create(row.method, bits=12, classes=10, options=options)


def test_every_range_holds_the_default_well_inside():
    for name, method in methods.registry().items():
        defaults = methods.hyper_parameters(method)
        for one in options_of(method):
            if one.tuned and not one.tuned.choices and name != "dfh":
                assert 0.2 < one.tuned.share(defaults[one.name].default) < 0.8, (name, one.name)


def test_points_are_those_of_the_stored_searches():
    """Trials that are stored somewhere count again only if they have the same points."""
    assert search().drawn == search().drawn
    assert search(points=32).drawn[:16] == search().drawn
    assert search(setup=FINETUNED).drawn != search().drawn
    assert search(Row("DPSH", "dpsh")).drawn[0] != search().drawn[0]
    stored = json.loads(RESULTS.read_text())["benches"]
    slug = "coco21-seed1-efficientnet-lite0-128-finetuned"
    setup = Setup("coco21", "coco21", image_size=128, finetune=True, split_seed=1)
    assert setup.slug == slug
    for row in (GREEDY, ROWS["dfh-paper"], Row("CSQ", "csq")):
        entry = stored[slug]["rows"][row.space]
        ranges = {name: Tuned.from_json(values) for name, values in entry["space"].items()}
        first = [point_of(one) for one in entry["trials"] if one["epochs"] == 5]
        assert search(row, setup, ranges=ranges, guess=entry.get("guess", {})).drawn == first


def test_a_quarter_of_the_epochs_then_the_best_quarter_in_full():
    runner = Done(near)
    first, second, *_ = numbers(search(), runner)
    assert {trial.epochs for trial in first} == {5}
    assert {cell.settings.head_epochs for trial in first for cell in trial.cells} == {5}
    assert {trial.epochs for trial in second} == {20}
    ranked = sorted(first, key=lambda trial: -score(trial, runner))
    assert [trial.point for trial in second] == [trial.point for trial in ranked[:4]]
    assert len(numbers(search(points=32), runner)[1]) == 8
    for cell in (cell for trial in first + second for cell in trial.cells):
        assert cell.settings.validation == tuning.HELD_OUT
        assert not cell.measured  # the queries are never used
        assert cell.seed == 0


def test_winners_without_and_with_the_class_step():
    entry = search().summary(Done(near, steps))
    full = [trial for trial in entry["trials"] if trial["epochs"] == 20]
    assert len(entry["trials"]) == 36  # the best with the step lies at an edge
    assert len(full) == 20
    best = max(full, key=lambda trial: trial["plain"])
    assert {**entry["winner"]["settings"], **entry["winner"]["options"]} == point_of(best)
    rates = [trial["settings"]["learning_rate"] for trial in full]
    assert entry["winner_step"]["settings"]["learning_rate"] == max(rates)
    assert entry["winner_step"]["class_step"] == {"weight": 1.0, "sharpness": 0.5}
    every = [trial["settings"]["learning_rate"] for trial in entry["trials"]]
    assert max(every) in rates  # the best with the step reached the later rounds
    stored = Winners({SETUP.slug: {"rows": {"greedyhash": entry}}})
    plain, stepped = stored.choice(SETUP, GREEDY), stored.choice(SETUP, GREEDY.stepped())
    assert plain.class_step is None
    assert stepped.class_step == {"weight": 1.0, "sharpness": 0.5}
    assert plain.settings != stepped.settings


def test_as_many_points_again_near_the_best():
    runner = Done(near, steps)
    _, second, third, *_ = numbers(search(), runner)
    assert len(third) == len(second) == 4
    assert {trial.epochs for trial in third} == {20}
    plain = max(second, key=lambda trial: score(trial, runner))
    stepped = max(second, key=lambda trial: trial.result(runner)["step"]["score"])
    assert plain.point != stepped.point
    for trial, best in zip(third, [plain, stepped, plain, stepped], strict=True):
        assert trial.point != best.point
        for one in search().space:
            was, now = best.point[one.name], trial.point[one.name]
            if one.tuned.choices:
                assert now == was
            else:
                assert abs(one.tuned.share(now) - one.tuned.share(was)) < 5 * tuning.NEAR
    assert numbers(search(), runner)[2] == third  # the same in every process


def test_rounds_beyond_the_edge_until_it_turns():
    """A row whose winner lies at an edge gets more rounds; another row gets none."""
    inside = Done(lambda cell: -abs(math.log(cell.settings.learning_rate / 0.03)))
    assert "learning_rate" not in search().summary(inside)["winner"]["edges"]
    assert numbers(search(), inside)[3:] == []
    endless = Done(lambda cell: cell.settings.learning_rate)
    _, _, third, *beyond = numbers(search(), endless)
    assert [len(one) for one in beyond] == [4] * tuning.MOST_BEYOND
    top = max(trial.point["learning_rate"] for trial in third)
    assert top > trials.LEARNING_RATES[False].most
    assert min(trial.point["learning_rate"] for one in beyond for trial in one) > top
    assert numbers(search(), endless)[3:] == beyond  # the same in every process
    assert "learning_rate" in search().summary(endless)["winner"]["edges"]
    # The best lies beyond the third round: it is found, and then followed no further.
    turned = Done(lambda cell: -abs(math.log(cell.settings.learning_rate / (1.2 * top))))
    assert len(numbers(search(), turned)[3:]) == 1
    assert "learning_rate" not in search().summary(turned)["winner"]["edges"]


def test_the_best_point_is_tried_with_every_way_to_make_bits():
    """Also where the points of the first round had none of them beside a good rate."""

    def cut_helps(cell):
        cut = cell.settings.outputs == 128 and cell.settings.cut == "between"
        return near(cell) + (0.1 if cut else 0.0)

    def way(trial):
        return trial.point["outputs"], trial.point["outputs"] and trial.point["cut"]

    runner = Done(cut_helps)
    tried = ways(search(), runner)
    before = [trial for one in numbers(search(), runner)[1:] for trial in one]
    best = max(before, key=lambda trial: score(trial, runner))
    every = {(0, 0), *((outputs, cut) for outputs in (64, 128) for cut in ("between", "first"))}
    assert {way(trial) for trial in tried} == every - {way(best)}
    assert len(tried) == 4
    for trial in tried:
        rest = {key: value for key, value in trial.point.items() if key not in ("outputs", "cut")}
        assert rest.items() <= best.point.items()
        assert trial.epochs == 20
    winner = search().summary(runner)["winner"]["settings"]
    assert (winner["outputs"], winner["cut"]) == (128, "between")
    # The class step counts as well: the best of both is what a row is shown with.
    stepped = ways(search(), Done(near, steps))
    assert {trial.point["learning_rate"] for trial in stepped} != {best.point["learning_rate"]}
    assert ways(search(Row("DQN", "dqn")), Done(near)) == []  # its bits are not made of outputs
    assert ways(search(), NOTHING) == []
    assert len(ways(search(), NOTHING, guess=True)) == 4
    # Nothing to go on from.
    assert ways(search(), Done(lambda cell: math.nan), guess=True) == []


def test_the_best_is_tried_with_a_classifier_beside_the_head():
    """After the ways to make bits, where the network is trained and the method knows labels."""

    def both_help(cell):
        cut = cell.settings.outputs == 128 and cell.settings.cut == "between"
        return near(cell) + 0.1 * cut + 0.1 * (cell.settings.classifier_weight == 0.5)

    live = search(setup=FINETUNED)
    runner = Done(both_help)
    tried = beside(live, runner)
    # The largest weight was the best, so one more was tried.
    assert [trial.point["classifier_weight"] for trial in tried] == [0.2, 0.5, 1.0]
    assert {(trial.point["outputs"], trial.point["cut"]) for trial in tried} == {(128, "between")}
    assert {trial.epochs for trial in tried} == {20}
    winner = live.summary(runner)["winner"]["settings"]
    assert (winner["outputs"], winner["classifier_weight"]) == (128, 0.5)
    more = beside(live, Done(lambda cell: near(cell) + cell.settings.classifier_weight))
    weights = [trial.point["classifier_weight"] for trial in more]
    assert weights == [0.2, 0.5, *(2.0**power for power in range(7))]
    none = beside(live, Done(lambda cell: near(cell) - cell.settings.classifier_weight))
    assert len(none) == len(tuning.CLASSIFIER_WEIGHTS)
    assert beside(search(), runner) == []  # frozen features
    assert beside(search(Row("CIBHash", "cibhash"), FINETUNED), runner) == []
    assert beside(live, NOTHING) == []
    assert len(beside(live, NOTHING, guess=True)) == 2


def test_a_larger_classifier_follows_while_it_is_best_in_either_ranking():
    """The largest weight of a winner is an edge like any other, until a larger one was tried."""

    def steps(cell):
        score = near(cell) - cell.settings.classifier_weight
        return [{"weight": 1.0, "sharpness": 1.0, "score": score}]

    def plain(cell):
        return near(cell) + 0.01 * min(cell.settings.classifier_weight, 1.0)

    live, runner = search(setup=FINETUNED), Done(plain, steps)
    # Without the class step 1 is the best and 2 is not; with it, none is.
    tried = beside(live, runner)
    assert [one.point["classifier_weight"] for one in tried] == [0.2, 0.5, 1.0, 2.0]
    entry = live.summary(runner)
    assert entry["winner"]["settings"]["classifier_weight"] == 1.0
    assert "classifier_weight" not in entry["winner"]["edges"] + entry["winner_step"]["edges"]
    assert len(entry["trials"]) == len(live.trials(runner))
    rising = live.summary(Done(lambda cell: near(cell) + cell.settings.classifier_weight))
    assert "classifier_weight" in rising["winner"]["edges"]


def test_a_search_ends_after_the_last_round_that_is_wanted():
    runner = Done(near)
    found = [search(setup=FINETUNED, last_round=name) for name in ROUNDS]
    lengths = [len(one.trials(runner)) for one in found]
    assert lengths == sorted(set(lengths))
    for one, name in zip(found, ROUNDS, strict=True):
        assert one.summary(runner)["last_round"] == name
        assert "winner" in one.summary(runner)


@pytest.mark.parametrize(
    ("weight", "sharpness", "edges"),
    [
        (1.0, 1.0, []),
        (0.25, 1.0, []),  # next to the least weight lies no step at all
        (4.0, 1.0, ["step_weight"]),
        (1.0, 0.25, ["step_sharpness"]),
        (4.0, 4.0, ["step_weight", "step_sharpness"]),
    ],
)
def test_a_class_step_at_an_end_of_its_grid_is_marked(weight, sharpness, edges):
    def grid(cell):
        pairs = itertools.product((0.25, 1.0, 4.0), repeat=2)
        return [
            {"weight": w, "sharpness": s, "score": near(cell) + ((w, s) == (weight, sharpness))}
            for w, s in pairs
        ]

    winner = search().summary(Done(near, grid))["winner_step"]
    assert winner["class_step"] == {"weight": weight, "sharpness": sharpness}
    assert [name for name in winner["edges"] if name.startswith("step_")] == edges


@pytest.mark.parametrize("sharpness", [0.0, class_step.LIMIT])
def test_a_class_step_that_nothing_further_would_change_lies_at_no_end(sharpness):
    best = class_step.ClassStep(class_step.LIMIT, sharpness)

    def limit(cell):
        return [one._asdict() | {"score": near(cell) + (one == best)} for one in class_step.GRID]

    winner = search().summary(Done(near, limit))["winner_step"]
    assert winner["class_step"] == best._asdict()
    assert not [name for name in winner["edges"] if name.startswith("step_")]


def test_diverged_trials_have_no_score_and_are_counted():
    def wild(cell):
        return math.nan if cell.settings.learning_rate > 0.05 else near(cell)

    entry = search().summary(Done(wild))
    none = [trial for trial in entry["trials"] if trial["plain"] is None]
    assert entry["without_score"] == len(none) > 0
    assert all(trial["settings"]["learning_rate"] > 0.05 for trial in none)
    assert entry["winner"]["settings"]["learning_rate"] <= 0.05
    hopeless = search().summary(Done(lambda cell: math.nan))
    assert "winner" not in hopeless
    assert hopeless["without_score"] == len(hopeless["trials"]) == 16


def test_no_winner_before_the_end():
    def half(cell):
        return None if cell.settings.learning_rate > 0.05 else near(cell)

    entry = search().summary(Done(half))
    assert "winner" not in entry
    assert 0 < len(entry["trials"]) < 16
    assert numbers(search(), Done(half))[1] == []
    assert len(numbers(search(), Done(half), guess=True)[1]) == 4


@pytest.mark.parametrize("name", ["dpsh", "dsdh", "dhn", "hashnet", "mihash", "dch"])
def test_a_factor_of_the_loss_is_1_in_every_trial(name):
    """Otherwise it would be a second learning rate."""
    found = search(Row(name, name))
    assert "loss_scale" not in {one.name for one in found.space}
    assert {cell.options["loss_scale"] for cell in trials.cells_of(numbers(found, NOTHING)[0])} == {
        1.0
    }
    assert found.summary(Done(near))["winner"]["options"]["loss_scale"] == 1.0


def test_files_are_merged_row_by_row(tmp_path):
    path = tmp_path / "tuning.json"
    first = {"rows": {"a": {"winner": {"options": {"x": 1}, "settings": {}}}}}
    second = {"rows": {"greedyhash": {"winner": {"options": {}, "settings": {}}}}}
    Winners({SETUP.slug: first}).save(path)
    Winners({SETUP.slug: second, "other": second}).save(path)
    found = Winners.load(path)
    assert found.benches[SETUP.slug]["rows"].keys() == {"a", "greedyhash"}
    assert found.choice(SETUP, GREEDY).tuned
    assert not found.choice(SETUP, GREEDY.stepped()).tuned
    assert not found.choice(SETUP, Row("DPSH", "dpsh")).tuned


def test_a_new_method_is_tuned_with_nothing_to_add(make_request, monkeypatch):
    class Toy(base.find("greedyhash")):
        info = base.MethodInfo("toy", "t", "v", 2020, "https://x", "classes")
        strength: Annotated[float, Range(least=0), Tuned(0.5, 2.0, "log")] = 1.0
        flavour: Annotated[str, Tuned(choices=("sweet", "sour"))] = "sweet"

    monkeypatch.setitem(base._REGISTRY, "toy", Toy)
    # Without the cut, which takes seconds.
    monkeypatch.setitem(specs.BASES, "toy", {"outputs": 0, "cut": "first"})
    part = specs.Part(specs.NUS_WIDE, (12,), (Row("Toy", "toy"),), (12, 24))
    monkeypatch.setitem(specs.SPECS, "toys", specs.Spec("toys", "Toys", (part,)))
    request = make_request(target="toys", tune=True, points=4, only=[], settings={"epochs": 4})
    outcome = reproduce(request)
    assert (outcome.left, outcome.failed) == (0, {})
    (bench,) = json.loads((outcome.page.parent / "tuning.json").read_text())["benches"].values()
    entry = bench["rows"]["toy"]
    assert {"learning_rate", "strength", "flavour", "quantization"} <= entry["space"].keys()
    assert [trial["epochs"] for trial in entry["trials"]] == [1, 1, 1, 1, 4, 4]
    assert 0.3 < entry["winner"]["options"]["strength"] < 3.0
    (run,) = outcome.results["parts"][0]["runs"]
    assert run["options"]["strength"] == entry["winner"]["options"]["strength"]
    page = outcome.page.read_text()
    assert "strength 0.5–2 (log)" in page
    assert "flavour sweet / sour" in page
    again = reproduce(request)
    assert again.left == 0
    assert again.results == outcome.results


def test_no_row_waits_for_the_search_of_another(make_request):
    plan = make_plan(make_request(only=["coco21", "dpsh", "csq", "12"], tune=True))
    setup = plan.setups[0]

    def tried(names):
        return {cell.method for cell in names if not cell.measured}

    def runs(names):
        return {cell.method for cell in names if cell.measured}

    nothing = plan.open_cells(setup, NOTHING)
    assert tried(nothing) == {"dpsh", "csq"}
    assert not runs(nothing)
    half = plan.open_cells(setup, Done(lambda cell: near(cell) if cell.method == "csq" else None))
    assert len(half) > len(nothing)  # the later rounds of the one that has results
    assert runs(half) == {"csq"}
    everything = plan.open_cells(setup, Done(near))
    assert runs(everything) == {"dpsh", "csq"}
    assert {c.file for c in everything if c.measured} == {c.file for c in plan.cells(setup)}


def test_trials_that_a_search_recorded_are_not_repeated():
    """As the JSON of a table holds them; all rounds go on from there as from the runs."""

    def inside(cell):
        """Every step of the grid; the best is not at its border."""
        return [
            one._asdict() | {"score": near(cell) + ((one.weight, one.sharpness) == (1, 1))}
            for one in class_step.GRID
        ]

    live = search(setup=FINETUNED)
    entry = json.loads(json.dumps(live.summary(Done(near, inside))))
    nothing = NOTHING
    again = dataclasses.replace(live, recorded=recorded_trials(entry))
    assert trials.cells_of(again.trials(nothing)) == []
    assert again.summary(nothing) == entry
    assert {trial["step"]["weight"] for trial in entry["trials"]} == {1.0}
    # One of them is missing: its runs, and nothing else, until it is known what it adds.
    lost = {**entry, "trials": entry["trials"][:-1]}
    short = dataclasses.replace(live, recorded=recorded_trials(lost))
    cells = trials.cells_of(short.trials(nothing))
    assert [cell.bits for cell in cells] == [12, 48]
    assert {cell.settings.classifier_weight for cell in cells} == {0.5}
    assert short.summary(Done(near, inside)) == entry


def test_a_trial_that_an_error_ended_is_tried_again():
    """One that diverged is not: it has given its answer."""

    class Broken(Done):
        def failure(self, cell):
            return {"error": "CUDA error"} if cell.settings.learning_rate > 0.05 else None

    def wild(cell):
        rate = cell.settings.learning_rate
        return None if rate > 0.05 else math.nan if rate > 0.02 else near(cell)

    entry = search().summary(Broken(wild))
    failed = [trial for trial in entry["trials"] if "failed" in trial]
    assert failed
    assert {trial["failed"] for trial in failed} == {"CUDA error"}
    assert all(trial["settings"]["learning_rate"] > 0.05 for trial in failed)
    known = [point_of(trial) for trial in recorded_trials(entry).values()]
    assert len(known) == len(entry["trials"]) - len(failed)
    assert any(0.02 < point["learning_rate"] <= 0.05 for point in known)


def test_a_winner_at_the_border_of_a_smaller_grid_is_tried_again():
    def grid(cell):
        pairs = itertools.product((0.25, 1.0, 4.0), (0.5, 1.0, 2.0))
        return [{"weight": w, "sharpness": s, "score": s + near(cell)} for w, s in pairs]

    entry = search().summary(Done(near, grid))
    best = entry["winner_step"]
    assert best["edges"] == ["step_sharpness"]
    again = dataclasses.replace(search(), recorded=recorded_trials(entry))
    (trial,) = [one for one in again.trials(NOTHING) if one.cells]
    assert trial.point == {**best["settings"], **best["options"]}


def test_a_short_trial_of_the_winner_is_not_tried_again():
    """Its own step lay at the border, the winner's does not."""

    def grid(cell):
        best = (4.0, 1.0) if cell.settings.epochs < SETTINGS.epochs else (1.0, 1.0)
        pairs = itertools.product((0.25, 1.0, 4.0), (0.5, 1.0, 2.0))
        return [
            {"weight": w, "sharpness": s, "score": near(cell) + ((w, s) == best)} for w, s in pairs
        ]

    entry = search().summary(Done(near, grid))
    assert not entry["winner_step"]["edges"]
    assert any("step_edges" in trial for trial in entry["trials"])
    assert len(recorded_trials(entry)) == len(entry["trials"])


def test_a_search_goes_on_in_the_ranges_that_it_was_made_in():
    """What a method declares later, or elsewhere, does not make the row be searched anew."""
    whole = dataclasses.replace(search(), last_round="numbers")
    ranges = {one.name: one.tuned for one in whole.space[:-1]}
    ranges["learning_rate"] = Tuned(0.002, 0.1, "log")
    fewer = dataclasses.replace(whole, ranges=ranges, guess={"codebook_seed": 3})
    entry = json.loads(json.dumps(Winners.of([fewer], Done(near)).benches))
    nothing = NOTHING
    again = Winners(entry).continued(whole)
    assert {one.name: one.tuned for one in again.space} == ranges
    assert again.drawn == fewer.drawn != whole.drawn
    assert trials.cells_of(again.trials(nothing)) == []
    assert again.summary(nothing) == entry[whole.setup.slug]["rows"][whole.row.space]
    # Other lengths are another search, of everything that is declared.
    other = dataclasses.replace(whole, bits=(64,))
    assert Winners(entry).continued(other) == other


def test_a_search_goes_on_from_the_file_of_an_earlier_one(make_request, tmp_path, monkeypatch):
    # Without the cut, which takes seconds.
    monkeypatch.setitem(specs.BASES, "csq", {"outputs": 0, "cut": "first"})
    asked = {"tune": True, "tune_only": True, "points": 4, "only": ["coco21", "csq"]}
    settings = {"epochs": 4}
    first = reproduce(make_request(**asked, settings=settings, out=str(tmp_path / "first")))
    file = first.page.parent / "tuning.json"
    earlier = json.loads(file.read_text())
    (bench,) = earlier["benches"].values()
    assert {*bench["identity"]} == {"protocol", "images", "weights"}
    said = []
    request = make_request(
        **asked, settings=settings, tuning=str(file), out=str(tmp_path / "second")
    )
    second = reproduce(request, say=said.append)
    assert not list((tmp_path / "second").glob("trials/*/*"))
    assert json.loads((tmp_path / "second" / "tuning.json").read_text()) == earlier
    assert any("trials of" in line and "will not be repeated" in line for line in said)
    assert second.left == 0
    # One folder has one file of winners, which names the settings of all of them once.
    mixed = make_request(**asked, settings={"epochs": 5}, out=str(tmp_path / "first"))
    with pytest.raises(UsageError, match=r"tuning.json has searches that were run with different "):
        reproduce(mixed)
    # Other settings make other trials, other weights too: both are refused.
    with pytest.raises(UsageError, match=r"settings \(epochs: 4 there, 5 here\); choose another"):
        reproduce(dataclasses.replace(request, settings={"epochs": 5}))
    for wrong, said_of in (
        ("none.json", "there is no file"),
        (second.page, "is damaged"),
    ):
        with pytest.raises(FisherhashError, match=said_of):
            reproduce(dataclasses.replace(request, tuning=str(wrong)))
    bench["identity"]["weights"] = "0" * 16
    del bench["rows"]["csq"]["trials"][0]
    file.write_text(json.dumps(earlier))
    with pytest.raises(UsageError, match=r"different weights; choose another --tuning"):
        reproduce(dataclasses.replace(request, out=str(tmp_path / "third")))
