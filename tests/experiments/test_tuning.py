"""Tuning: the second trials stand on the best of the first, and the best of all wins."""

import dataclasses

import pytest

from fisherhash.experiments import tuning
from fisherhash.experiments.benches import Bench
from fisherhash.experiments.specs import Row
from fisherhash.training.settings import Settings

BENCH = Bench("cifar10", "cifar10-small", image_size=128)
FINETUNED = dataclasses.replace(BENCH, finetune=True)
SETTINGS = Settings(epochs=3)
GREEDY = Row("Greedy Hash", "greedyhash")


class Done:
    """Stands for a runner whose trials have these scores; None is still to do."""

    def __init__(self, score):
        self.score = score

    def row(self, cell):
        value = self.score(cell)
        return None if value is None else {"validation_map": value}

    def failure(self, cell):
        return None

    def ended(self, cell):
        return self.score(cell) is not None


def by_rate(cell):
    """Best at 0.03, and a little better with more quantisation."""
    return 1.0 - abs(cell.settings.learning_rate - 0.03) + cell.options.get("quantization", 0) / 100


def search(name, bench=BENCH):
    return tuning.Search(Row(name, name), bench, SETTINGS, 24)


def expected(name, bench, runner):
    found = search(name, bench)
    return [cell for _, cell in found.first() + found.second(runner, guess=True)]


def find(runner, bench=BENCH):
    found = tuning.summarise([search("greedyhash", bench)], runner)
    assert found[bench.slug]["bits"] == 24
    assert found[bench.slug]["settings"]["validation"] == tuning.HELD_OUT
    return found[bench.slug]["rows"]["greedyhash"]


def test_the_winner_of_two_rounds():
    entry = find(Done(by_rate))
    assert len(entry["trials"]) == tuning.BUDGET
    assert {trial["learning_rate"] for trial in entry["trials"][4:]} == {0.03}
    assert entry["winner"] == {
        "options": {"quantization": 1.0},
        "settings": {"learning_rate": 0.03},
    }


def test_a_whole_network_gets_fewer_rates_and_as_many_second_trials():
    entry = find(Done(by_rate), FINETUNED)
    assert len(entry["trials"]) == tuning.FINETUNED_BUDGET
    assert [trial["learning_rate"] for trial in entry["trials"]] == [0.001, 0.003, *[0.01] * 3]
    assert len(entry["space"]["then"]) == 2


@pytest.mark.parametrize("bench", [BENCH, FINETUNED])
def test_second_trials_are_as_many_as_the_rates_leave(bench):
    cells = expected("cnnh", bench, Done(lambda cell: None))
    budget = tuning.FINETUNED_BUDGET if bench.finetune else tuning.BUDGET
    assert len(cells) == budget
    own = [cell for cell in cells if cell.options.get("sweeps") == 30]
    assert len(own) == 1
    three = tuning.SPACES["dhn"]
    assert len(three.rates(bench)) == 3
    assert three.others(bench) == three.own[: budget - 3]


@pytest.mark.parametrize("bench", [BENCH, FINETUNED])
def test_trials_hold_images_out_and_look_at_no_query(bench):
    cells = expected("greedyhash", bench, Done(by_rate))
    assert len(cells) == (tuning.FINETUNED_BUDGET if bench.finetune else tuning.BUDGET)
    assert {cell.settings.validation for cell in cells} == {tuning.HELD_OUT}
    assert not any(cell.measured for cell in cells)
    assert {(cell.bits, cell.seed) for cell in cells} == {(24, 0)}


def test_no_winner_before_the_end():
    entry = find(Done(lambda cell: None if cell.settings.learning_rate > 0.05 else by_rate(cell)))
    assert "winner" not in entry
    assert len(entry["trials"]) == 3
    assert search("greedyhash").second(Done(lambda cell: None)) == []


def test_files_are_merged_row_by_row(tmp_path):
    path = tmp_path / "tuning.json"
    first = {"bits": 24, "rows": {"a": {"winner": {"options": {"x": 1}, "settings": {}}}}}
    second = {"bits": 24, "rows": {"greedyhash": {"winner": {"options": {}, "settings": {}}}}}
    tuning.Tuning({BENCH.slug: first}).save(path)
    tuning.Tuning({BENCH.slug: second, "other": second}).save(path)
    found = tuning.Tuning.load(path)
    assert found.benches[BENCH.slug]["rows"].keys() == {"a", "greedyhash"}
    assert found.choice(BENCH, GREEDY).tuned
    assert not found.choice(BENCH, Row("DPSH", "dpsh")).tuned
