"""Two rehearsals of a family -> the micro-batches that their line may speak for.

A line goes through any two points. So a third rehearsal, far away, is held against it before a
plan of the family is shown. Where no family follows its line, a few micro-batches are rehearsed
themselves, and only these are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.verbs.rehearsals import Unrehearsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from oomph.predicting.footprint import Footprint
    from oomph.predicting.ways import Family, Ways
    from oomph.records.catalog import GpuModel
    from oomph.records.workload import Variant
    from oomph.verbs.rehearsals import Rehearsed, Rehearser

# A rehearsal may be so far off the line, as a share of its peak: some workspaces grow in steps. It
# is a fifth of what the error bar has for reasons without a name. Judgement.
OFF_RATIO = 0.01
_MANY = 4  # micro-batches, where each costs rehearsals of its own: then every other is left out


class Failed(Exception):
    """What was rehearsed of one way to train could not be put together: it is left out."""

    def __init__(self, variant: Variant, error: Exception) -> None:
        self.variant, self.error = variant, error
        super().__init__(str(error))


class Lines:
    """Memory and time of every variant that a line, or a rehearsal of its own, speaks for."""

    def __init__(
        self,
        rehearsed: Rehearsed,
        rehearser: Rehearser | None,
        model: GpuModel,
        say: Callable[[str], None],
    ) -> None:
        from oomph.predicting.ways import Ways

        self.rehearsed, self._rehearser, self._model, self._say = rehearsed, rehearser, model, say
        self._line = Ways(
            families=rehearsed.families,
            steps=rehearsed.steps,
            model=model,
            known_replays=rehearsed.replays,
            adds_up=rehearsed.adds_up,
        )
        self.broken: set[Family] = set()  # their own rehearsals were off the line
        self.points: dict[int, Ways] = {}  # where there are no lines: micro-batches by themselves
        self.failed: dict[tuple[object, ...], Failed] = {}  # what could not be put together

    def of(self, variant: Variant) -> Ways:
        """What answers for a variant that is known."""
        return self.points.get(variant.micro_batch, self._line)

    def knows(self, variant: Variant) -> bool:
        from oomph.predicting.ways import family_of

        if self.why_failed(variant) is not None:
            return False
        if self.points and variant.micro_batch > 1:
            return variant.micro_batch in self.points and self.of(variant).knows(variant)
        return self._line.knows(variant) and family_of(variant) not in self.broken

    def why_failed(self, variant: Variant) -> Failed | None:
        return self.failed.get(_combination(variant)) if self.failed else None

    def leave_out(self, failed: Failed) -> None:
        """From now on it is not known, at whatever micro-batch. Raises what has failed before."""
        key = _combination(failed.variant)
        if key in self.failed:
            raise failed.error
        self.failed[key] = failed

    def complete(self, wanted: Sequence[Variant]) -> None:
        """Rehearse what of these is not known yet. Raises Unrehearsed."""
        from oomph.verbs.rehearsals import complete, missing

        if any(missing(self.rehearsed, wanted)):
            complete(self.rehearsed, self._required(), wanted, self._say)

    def _required(self) -> Rehearser:
        if self._rehearser is None:
            raise Unrehearsed
        return self._rehearser

    # ---- a third rehearsal -----------------------------------------------------------------------

    def holds(self, far: Variant) -> bool:
        """Whether the line of a variant's family is true up to it; if not, it is not used again."""
        from oomph.predicting.ways import family_of
        from oomph.verbs.rehearsals import for_family, in_short

        family = family_of(far)
        if family in self.broken:
            return False
        if family.only_at:  # it was rehearsed at this very micro-batch
            return True
        wanted = for_family(far, far.micro_batch)
        try:
            is_true = self._is_seen_on_line(family, wanted)
        except Unrehearsed:
            raise
        except Exception as error:  # noqa: BLE001 - so far away it cannot be trained
            self.rehearsed.failed[family] = in_short(error)
            del self.rehearsed.families[family]
            return False
        if not is_true:
            self.broken.add(family)
        return is_true

    def _is_seen_on_line(self, family: Family, wanted: Variant) -> bool:
        """By a rehearsal at least so far away."""
        from oomph.predicting.ways import family_of

        return any(
            key.micro_batch >= wanted.micro_batch
            and family_of(key) == family
            and self._is_as_told(key, seen)
            for key, seen in self.rehearsed.exact.items()
        ) or self._is_on_line(family, wanted.micro_batch, self._seen(wanted))

    def _is_as_told(self, variant: Variant, seen: Footprint) -> bool:
        """Whether a rehearsal says what its parts say, whichever its optimizer is."""
        if not self._line.knows(variant):
            return False
        told_bytes = self._line.least_bytes(variant)
        seen_bytes = seen.live_bytes(variant.micro_batch)
        return abs(told_bytes - seen_bytes) <= OFF_RATIO * seen_bytes

    def _is_on_line(self, family: Family, micro_batch: int, seen: Footprint) -> bool:
        line_bytes = self.rehearsed.families[family].live_bytes(micro_batch)
        seen_bytes = seen.live_bytes(micro_batch)
        return abs(line_bytes - seen_bytes) <= OFF_RATIO * seen_bytes

    def _seen(self, variant: Variant) -> Footprint:
        """By its own rehearsal, as far as its forward and backward go."""
        from oomph.verbs.rehearsals import footprint_of_one, in_words

        known = self.rehearsed.exact.get(variant)
        if known is not None:
            return known
        rehearser = self._required()
        self._say(f"rehearsing {in_words(variant)} with {variant.micro_batch} examples")
        found = footprint_of_one(rehearser.trace(variant))
        self.rehearsed.exact[variant] = found
        return found

    # ---- no lines at all -------------------------------------------------------------------------

    def use_points_for(self, wanted: Iterable[Variant]) -> None:
        """Where no line goes through anything that is wanted: rehearse a few of it themselves."""
        several = [variant for variant in wanted if variant.micro_batch > 1]
        if not several or any(self.knows(variant) for variant in several):
            return
        sizes = sorted({variant.micro_batch for variant in several}, reverse=True)
        for micro_batch in sizes[::2] if len(sizes) >= _MANY else sizes:
            chosen = [variant for variant in several if variant.micro_batch == micro_batch]
            self.points[micro_batch] = self._point(micro_batch, chosen)

    def _point(self, micro_batch: int, variants: Sequence[Variant]) -> Ways:
        """Every family of these at one micro-batch."""
        from oomph.predicting.ways import Ways, family_of
        from oomph.verbs.rehearsals import for_family, what_fails

        alike = {for_family(variant, micro_batch) for variant in variants}
        families: dict[Family, Footprint] = {}
        for variant in sorted(alike, key=repr):
            with what_fails(self.rehearsed, family_of(variant), variant):
                families[family_of(variant)] = self._seen(variant)
        return Ways(
            families=families,
            steps=self.rehearsed.steps,
            model=self._model,
            adds_up=self.rehearsed.adds_up,
        )


def _combination(variant: Variant) -> tuple[object, ...]:
    """What is put together of the same rehearsals in the same way."""
    from oomph.predicting.ways import family_of, step_of

    return family_of(variant), step_of(variant), variant.accumulation == 1
