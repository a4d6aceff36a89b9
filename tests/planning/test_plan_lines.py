"""A line speaks for a micro-batch only as far as a third rehearsal agrees with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from predicting.footprints import traced
from predicting.test_footprint import footprint

from oomph.planning.lines import Lines, is_on_line
from oomph.planning.rehearsals import (
    Rehearsed,
    Unrehearsed,
    footprint_of_one,
    variant_for_passes,
)
from oomph.predicting.combinations import pass_settings_of, step_of
from oomph.predicting.footprint import Footprint
from oomph.records.workload import Variant
from oomph.sensing.catalog import find
from planning.test_choices import BERT

HOW = Variant(micro_batch=2, accumulation=2)


def at(micro_batch: int) -> Variant:
    return replace(HOW, micro_batch=micro_batch)


def seen(micro_batch: int, *, share_more: float = 0.0) -> Footprint:
    """A rehearsal there, or one that takes more than that."""
    found = footprint_of_one(traced("adamw", at(micro_batch)))
    more = (found.fixed_bytes * (1 + share_more)).astype(found.fixed_bytes.dtype)
    return replace(found, fixed_bytes=more)


def lines(exact: dict[Variant, Footprint]) -> Lines:
    """With nobody who could rehearse."""
    known = Rehearsed(
        possible=BERT,
        batch_size=64,
        clips_gradients=True,
        costs=(),
        torch_version="2.13.0",
        pass_footprints={pass_settings_of(HOW): footprint("adamw", HOW)},
        steps={step_of(HOW): footprint("adamw", HOW)},
        exact=exact,
    )
    return Lines(known, None, find("a100-80gb").model, lambda _: None)


def test_a_rehearsal_on_the_line_confirms_it_up_to_there_and_no_farther() -> None:
    known = lines({at(5): seen(5)})
    assert known.holds(at(5))
    assert known.holds(at(3))
    with pytest.raises(Unrehearsed):
        known.holds(at(7))
    assert known.knows(at(5))


def test_a_rehearsal_off_the_line_refutes_its_family() -> None:
    known = lines({at(5): seen(5, share_more=0.02)})
    assert known.knows(at(5))
    assert not known.holds(at(5))
    assert not known.knows(at(5))
    assert not known.holds(at(3))  # and nobody is asked again
    assert known.broken == {pass_settings_of(HOW)}


def test_a_trifle_off_the_line_is_no_refutation() -> None:
    assert lines({at(5): seen(5, share_more=0.005)}).holds(at(5))


def test_the_line_is_as_narrow_as_a_hundredth_of_the_peak() -> None:
    assert is_on_line(1000, 1008)
    assert is_on_line(1008, 1000)
    assert not is_on_line(1000, 1015)


@pytest.mark.parametrize(("sizes", "rehearsed"), [((3, 5, 7), (3, 5, 7)), ((2, 3, 5, 7), (3, 7))])
def test_without_lines_every_other_micro_batch_is_rehearsed_from_four_on(
    sizes: tuple[int, ...], rehearsed: tuple[int, ...]
) -> None:
    known = lines({variant_for_passes(at(size), size): seen(size) for size in sizes})
    known.rehearsed.pass_footprints.clear()
    known.use_points_for([at(size) for size in sizes])
    assert sorted(known.points) == [*rehearsed]


def test_what_is_refuted_far_away_may_be_true_nearer() -> None:
    known = lines({at(7): seen(7, share_more=0.02), at(3): seen(3)})
    assert known.holds(at(3))
    assert not lines({at(7): seen(7, share_more=0.02)}).holds(at(7))


def test_other_families_and_other_optimizers_confirm_nothing() -> None:
    others = (
        replace(at(5), precision="bf16"),
        replace(at(5), optimizer="fused"),
        replace(at(5), accumulation=1),
    )
    with pytest.raises(Unrehearsed):
        lines({other: seen(5) for other in others}).holds(at(5))
