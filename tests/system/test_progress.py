"""Progress where there is no terminal: a line now and then, with the speed and the time left."""

import logging

import pytest

from fisherhash.system import progress as module


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def lines_of(caplog, clock, steps, total=1000):
    caplog.set_level(logging.INFO, logger="fisherhash")
    with module.progress("encoding photos", total) as advance:
        for seconds, step in steps:
            clock[0] = 100.0 + seconds
            advance(step)
    return [record.message for record in caplog.records]


def test_lines_come_now_and_then_with_speed_and_time_left(caplog, clock):
    lines = lines_of(caplog, clock, [(second, 10) for second in range(1, 41)])
    assert lines == [
        "encoding photos: 50 of 1,000, 10 per second, 95 s left",
        "encoding photos: 350 of 1,000, 10 per second, 65 s left",
    ]


def test_a_short_job_logs_nothing(caplog, clock):
    assert lines_of(caplog, clock, [(1, 500), (4, 500)]) == []


def test_what_was_done_before_does_not_count_for_the_speed(caplog, clock):
    lines = lines_of(caplog, clock, [(0, 900), (10, 50)])
    assert lines == ["encoding photos: 950 of 1,000, 5 per second, 10 s left"]


def test_nothing_done_yet_has_no_speed():
    assert module.describe_progress(0, 10, 0.0) == "0 of 10"


def test_a_bar_on_a_terminal_shows_the_speed():
    bar = module._rich_bar()
    task = bar.add_task("encoding", total=100)
    bar.tasks[0]._progress.clear()
    rendered = [column for column in bar.columns if type(column).__name__ == "Speed"]
    assert len(rendered) == 1
    assert rendered[0].render(bar.tasks[0]) == ""
    clock = iter(range(100))
    bar.get_time = lambda: float(next(clock))
    for _ in range(5):
        bar.advance(task, 20)
    assert rendered[0].render(bar.tasks[0]).endswith("/s")


def test_a_program_can_follow_the_progress(caplog, clock):
    told = []
    with module.progress_to(lambda *job: told.append(job)), module.progress("a [job]", 9) as step:
        clock[0] += 100.0
        step(2)
        step(3)
    assert told == [("a [job]", 0, 9), ("a [job]", 2, 9), ("a [job]", 5, 9)]
    assert caplog.records == []
    with module.progress("another", 9) as step:
        step(1)
    assert len(told) == 3
