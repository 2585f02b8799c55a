"""The load test in short: it passes on the server, and sees what is wrong."""

from __future__ import annotations

from collections import Counter

from tests.scripts_by_path import load_script

load_test = load_script("load_test")
Footprint, Load, compared = load_test.Footprint, load_test.Load, load_test.compared


def test_under_load_every_answer_is_right_and_nothing_is_left(tiny_dir):
    result = load_test.run(tiny_dir, seconds=2.0, clients=12, requests=20, tokens=6, seed=0)
    assert result["problems"] == []
    outcomes = Counter(result["outcomes"])
    assert outcomes["in a row: right"] == 24
    for behave in load_test.BEHAVIOURS:
        assert any(name.startswith(f"{behave.__name__}: ") for name in outcomes), outcomes
    assert outcomes["streamed: right"] and outcomes["whole: right"] and outcomes["slowly_sent: right"]


def test_a_wrong_answer_and_a_leak_are_seen():
    load = Load("http://localhost", [], right=["a"])
    assert [load.judge(0, 200, "a"), load.judge(0, 503, None)] == ["right", "refused"]
    assert load.problems == []
    assert [load.judge(0, 200, "b"), load.judge(0, 500, None)] == ["wrong", "wrong"]
    compared(load, "x", Footprint(5, 20, 100.0), Footprint(5, 20, 101.0))
    assert len(load.problems) == 2
    compared(load, "x", Footprint(5, 20, 100.0), Footprint(6, 21, 101.0 + load_test.MAX_GROWTH_MIB))
    assert [problem.split(":")[1].split(" grew")[0] for problem in load.problems[2:]] == [
        " threads",
        " files",
        " memory",
    ]
