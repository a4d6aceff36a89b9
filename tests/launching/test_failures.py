"""Of all that failed, the rank that failed first is named, with its own error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.launching.failures import (
    RankError,
    first_failure,
    forget_failures,
    read_errors,
    read_failure,
    write_error,
    write_failure,
)

PEER = "RuntimeError: [gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def error(rank: int, at: float, text: str = "ValueError: no") -> RankError:
    return RankError(rank, at, text, f"Traceback ...\n{text}")


@given(st.permutations([error(2, 1.0), error(0, 1.1, PEER), error(3, 1.3, "KeyError: 'x'")]))
def test_the_earliest_error_is_the_cause(errors: list[RankError]) -> None:
    failure = first_failure(sorted(errors, key=lambda one: one.at), {0: 1, 2: 1})
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.error) == (2, 1, "ValueError: no")


def test_a_rank_that_was_killed_goes_before_those_that_lost_it() -> None:
    failure = first_failure([error(0, 1.0, PEER), error(1, 1.1, PEER)], {0: 1, 3: -9})
    assert failure is not None
    assert (failure.rank, failure.signal, failure.exit_code) == (3, "SIGKILL", 137)
    assert failure.error is None


def test_a_rank_that_left_with_a_code_goes_before_those_that_lost_it() -> None:
    failure = first_failure([error(0, 1.0, PEER)], {1: 7})
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.signal) == (1, 7, None)


def test_a_rank_that_torchrun_ended_is_not_the_cause() -> None:
    for codes in ({0: -15, 1: -6}, {0: -15, 1: -9}, {0: -9, 1: 7, 2: -15}):
        failure = first_failure([], codes)
        assert failure is not None
        assert failure.rank == 1
    # What ended first is on another machine: here one lost it, and torchrun ended the other.
    failure = first_failure([error(1, 1.0, PEER)], {0: -15, 1: 1})
    assert failure is not None
    assert (failure.rank, failure.is_consequence) == (1, True)
    failure = first_failure([], {0: -15, 1: -15})  # a user's kill
    assert failure is not None
    assert failure.signal == "SIGTERM"


def test_an_error_that_only_blames_a_peer_says_so() -> None:
    failure = first_failure([error(0, 1.0, PEER)], {0: 1})
    assert failure is not None
    assert (failure.rank, failure.is_consequence) == (0, True)


def test_nothing_failed_means_no_failure(tmp_path: Path) -> None:
    assert first_failure([], {}) is None
    assert read_failure(tmp_path) is None


def test_what_ranks_write_is_read_in_order_and_a_torn_file_is_left_out(tmp_path: Path) -> None:
    write_error(tmp_path, error(1, 5.0))
    write_error(tmp_path, error(0, 4.0))
    (tmp_path / "error-2.json").write_text('{"rank": 2')
    assert [one.rank for one in read_errors(tmp_path)] == [0, 1]
    # Under the user's own torchrun nobody writes the list of exit codes.
    failure = read_failure(tmp_path)
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (0, None)
    write_failure(tmp_path, failure)
    assert read_failure(tmp_path) == failure
    forget_failures(tmp_path)
    assert read_failure(tmp_path) is None


@pytest.mark.parametrize("code", [-200, -9, 0, 255])
def test_any_exit_code_has_words(code: int) -> None:
    failure = first_failure([], {0: code})
    assert failure is not None
    assert (failure.signal is None) == (code >= 0)
