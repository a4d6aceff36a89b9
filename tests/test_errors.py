"""Every error says what, because and try, and becomes its exit code."""

from __future__ import annotations

from oomph.errors import EXIT_UNREADABLE, EXIT_USAGE, OomphError, UnknownGpu, Unreadable, UsageError


def test_an_error_says_what_happened_why_and_what_to_try() -> None:
    error = UsageError("no such thing", because="it is not there", attempt="another thing")
    assert str(error) == "no such thing\n  because: it is not there\n  try: another thing"
    assert error.in_one_line() == "no such thing (it is not there); try: another thing"


def test_an_error_leaves_out_what_it_does_not_know() -> None:
    assert str(OomphError("no such thing")) == "no such thing"
    assert OomphError("no such thing").in_one_line() == "no such thing"


def test_each_error_has_its_exit_code() -> None:
    assert UsageError("x").exit_code == EXIT_USAGE
    assert UnknownGpu("x").exit_code == EXIT_USAGE
    assert Unreadable("x").exit_code == EXIT_UNREADABLE


def test_an_unknown_gpu_suggests_its_nearest_names_or_the_catalogue() -> None:
    assert "one of a100-40gb, a100-80gb" in str(UnknownGpu("x", nearest=("a100-40gb", "a100-80gb")))
    assert "oomph gpus --catalog" in str(UnknownGpu("x"))
