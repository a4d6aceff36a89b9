"""Answers that cost something: made once, whoever asks; and told where they cannot be made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from nvml.machine import Gpu

from oomph.serving.application import Cache
from serving.served import serving

LONG_S = 3600.0


def test_all_who_ask_at_the_same_time_get_the_one_answer() -> None:
    kept: Cache[int] = Cache(LONG_S, most=4)
    made: list[int] = []
    is_asked = threading.Barrier(8)
    answers: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    def ask() -> None:
        is_asked.wait()
        answers.append(kept.get("question", make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, answers) == ([0], [0] * 8)


def test_an_answer_that_is_old_is_made_anew() -> None:
    kept: Cache[int] = Cache(fresh_s=0.0, most=4)
    numbers = iter(range(9))
    assert [kept.get("question", lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]


def test_only_the_last_few_are_kept() -> None:
    kept: Cache[str] = Cache(LONG_S, most=2)
    made: list[str] = []

    def ask(question: str) -> str:
        def make() -> str:
            made.append(question)
            return question

        return kept.get(question, make)

    assert [ask(question) for question in "aabcab"] == list("aabcab")
    assert made == ["a", "b", "c", "a", "b"]


def test_what_fails_is_not_kept() -> None:
    kept: Cache[int] = Cache(LONG_S, most=2)

    def fail() -> int:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        kept.get("question", fail)
    assert kept.get("question", lambda: 7) == 7


def test_a_run_that_cannot_be_read_is_told_in_words_and_others_are_listed(tmp_path: Path) -> None:
    for name, content in (("20261116-050000-aaaa", "{"), ("20261116-050000-bbbb", '{"schema": 9}')):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "meta.json").write_text(content)
    with serving(tmp_path, [Gpu()]) as server:
        assert server.get("/api/runs").json == {"runs": [], "num_runs": 0}
        assert server.get("/api/runs/20261116-050000-aaaa").status == 404
        assert server.get("/api/runs/20261116-050000-cccc").status == 404
        assert server.get("/api/plans").json == {"plans": [], "is_served": False}
        assert server.end() == (0, "")
