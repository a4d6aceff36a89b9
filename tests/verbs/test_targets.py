"""What is left to torch of the GPU that a question is about."""

from __future__ import annotations

import pytest

from oomph.errors import UsageError
from oomph.units import GIB
from oomph.verbs.targets import find_target


def test_all_of_an_emulated_gpu_is_torchs() -> None:
    card = find_target("emulated", "2GiB").with_torch("2.13.0").card
    assert card.usable.low_bytes == card.usable.high_bytes == 2 * GIB
    assert card.outside(has_convolutions=True).high_bytes == 0
    assert card.is_emulated  # and has no kernels that nobody has seen
    with pytest.raises(UsageError, match="no memory of its own"):
        find_target("emulated", None)
