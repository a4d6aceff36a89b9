"""Plans -> what `oomph plan` prints and draws: the answer first, then the table.

Also the reverse: files of plans -> what their page shows, for `oomph serve --plans`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomph.errors import Unreadable
from oomph.records.plan import Cut, Offer, Plan, Plans, Rejected, Shortfall, Timeline
from oomph.records.stored import (
    LARGEST_FILE_BYTES,
    SCHEMA,
    from_json_file,
    from_jsonable,
    no_record,
    to_jsonable,
)
from oomph.showing.html_page import filled_page
from oomph.showing.predict import FITS, named_tricks
from oomph.showing.terminal import (
    GAP,
    Column,
    Glyphs,
    fitting,
    glyphs_for,
    lines,
    new_console,
    print_command,
    print_line,
    print_prose,
    print_table,
    with_wrapped,
)
from oomph.store import write_whole
from oomph.tricks.trick import tricks_on
from oomph.units import format_bytes, format_duration, format_ratio, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from oomph.records.workload import Variant


_STABILITY = {
    "same": ("same", "green"),
    "rounding": ("rounding", ""),
    "changes": ("CHANGES", "bold yellow"),
}
_BAR_WIDTH = 14
_KEEP_BAR = 3  # the bar goes first
_LEAST_FOR_TRICKS = 20  # characters; judgement: with fewer, a table is mostly line ends
_MOST_LEFT_OUT = 4  # combinations named, of those that a time limit cut; judgement
_IN_WORDS = {
    "same": "exactly the same update",
    "rounding": "the same up to rounding",
    "changes": "a different training",
}


def print_plans(plans: Plans, *, explains: bool = False, then: Sequence[str] = ()) -> None:
    """Print the answer; with why tricks were not considered if it `explains`; `then` is next."""
    console = new_console()
    _print_as_is(console, plans)
    if plans.best is None:
        _print_shortfall(console, plans)
    else:
        _print_best(console, plans.best, is_batch_known=_is_batch_known(plans))
        _print_table(console, plans)
    _print_offers(console, plans)
    if plans.best is not None:
        _print_tricks(console, plans.best)
    for caveat in plans.caveats:
        print_prose(console, f"- {caveat}")
    if explains:
        _print_rejected(console, plans.rejected)
    _print_compared(console, plans, explains=explains)
    if plans.seen is not None:
        from oomph.showing.script import print_seen

        print_seen(console, plans.seen)
    if plans.cut is not None:
        print_prose(console, _cut_in_words(plans.cut), "yellow")
    for command in then:
        print_command(console, command)


def _print_as_is(console: Console, plans: Plans) -> None:
    as_is = plans.as_is
    needs = f"{format_bytes(as_is.device_bytes)} of {format_bytes(plans.capacity_bytes)}"
    verdict, style = FITS[plans.fits_as_is]
    on = f"{plans.workload} {verdict} as it is on {plans.gpu}"
    print_prose(console, f"{on}: {_batch(plans)} needs {needs}{_room(plans)}", style)


def _is_batch_known(plans: Plans) -> bool:
    return plans.seen is None or plans.seen.is_batch_known


def _batch(plans: Plans) -> str:
    given = plans.as_is.variant
    if not _is_batch_known(plans):
        return "its own batch (of unknown size)"
    if given.accumulation == 1:
        return f"a batch of {plans.batch_size} at once"
    return f"a batch of {plans.batch_size} as {given.micro_batch} x {given.accumulation}"


def _room(plans: Plans) -> str:
    """Return how much stays free if the training fits unchanged."""
    if plans.fits_as_is != "yes":
        return ""
    left_bytes = plans.capacity_bytes - plans.as_is.high_bytes
    if left_bytes < 0:  # torch's cache does not count as needed: it is freed before memory runs out
        return "; at worst it fills the GPU and torch frees its cache"
    grow = plans.largest_micro_batch
    more = f"; micro-batches up to about {grow} would fit" if grow else ""
    return f"; at least {format_bytes(left_bytes)} stay free{more}"


def _print_best(console: Console, best: Plan, *, is_batch_known: bool) -> None:
    words = in_words(best, is_batch_known)
    if best.fits == "yes":
        print_prose(console, f"recommended: {words}", "bold")
    else:
        taken = _of(best.prediction.device_bytes, best.prediction.capacity_bytes)
        said = f"Nothing is certain to fit. Closest: {words}: {taken}, uncertain."
        print_prose(console, said, "bold yellow")
    print_prose(console, best.why, indent=2)


def in_words(plan: Plan, is_batch_known: bool = True) -> str:
    """Return what a plan sets, in a few words."""
    return _set_by(plan.variant, _names(plan), is_batch_known)


def _set_by(variant: Variant, names: Sequence[str], is_batch_known: bool) -> str:
    """Return what a variant sets, without the split of the batch if its size is unknown."""
    split = f"micro-batch {variant.micro_batch} x {variant.accumulation}"
    parts = [split if is_batch_known else "the script's own batch"]
    if variant.num_gpus > 1:
        parts.append(f"{variant.num_gpus} GPUs")
    return ", ".join([*parts, *names])


def _of(taken_bytes: int, capacity_bytes: int) -> str:
    """
    >>> _of(2 << 30, 4 << 30)
    '2.0 GiB of 4.0 GiB'
    """
    return f"{format_bytes(taken_bytes)} of {format_bytes(capacity_bytes)}"


def _names(plan: Plan) -> list[str]:
    num_blocks = len(plan.block_names)
    return named_tricks((trick.name for trick in plan.tricks), plan.variant, num_blocks)


# ---- the table -----------------------------------------------------------------------------------


def _print_table(console: Console, plans: Plans) -> None:
    """Print the table, with long tricks on several lines, or below the figures of their row."""
    shown, capacity = plans.plans, plans.capacity_bytes
    is_known, glyphs = _is_batch_known(plans), glyphs_for(console.encoding)
    predictions = [plan.prediction for plan in shown]
    hosts = [format_bytes(one.host_bytes) if one.host_bytes else "" for one in predictions]
    steps = ["" if one.step_s is None else format_time(one.step_s) for one in predictions]
    tricks = [", ".join(_names(plan)) or "as it is" for plan in shown]
    columns = [
        Column("", ["->" if p.recommended else "" for p in shown], keep=9),
        Column(
            "batch", [f"{p.micro_batch} x {p.accumulate}" if is_known else "own" for p in shown]
        ),
        Column("tricks", tricks, align="<"),
        Column("update", [[_STABILITY[p.stability]] for p in shown], keep=7, align="<"),
        Column(_of_gpu(plans), [bar(glyphs, p, capacity) for p in shown], _KEEP_BAR, "<"),
        Column("memory", [format_bytes(one.device_bytes) for one in predictions], keep=9),
        Column("GPUs", [str(p.gpus) for p in shown] if plans.is_about_several else (), keep=5),
        Column("host", hosts, keep=4),
        Column("step", steps, keep=6),
        Column("time", [_ratio_in_words(ratio) for ratio in plans.time_ratios], keep=8),
    ]
    kept, room = _beside_tricks(columns, console.width)
    console.print()
    if room >= _LEAST_FOR_TRICKS:
        print_table(console, with_wrapped(kept, "tricks", room))
    else:
        kept = fitting([one for one in kept if one.heading != "tricks"], console.width)
        heading, *rows = lines(kept)
        print_line(console, heading)
        for row, names in zip(rows, tricks, strict=True):
            print_line(console, row)
            print_prose(console, names, indent=4)
    print_prose(console, _legend(plans, glyphs, {column.heading for column in kept}), "dim")
    _print_all_gpus(console, plans)
    console.print()


def _beside_tricks(columns: Sequence[Column], width: int) -> tuple[list[Column], int]:
    """Return the columns to show, without the bar if that makes room for tricks, and that room."""
    kept = [one for one in columns if not one.is_empty]
    without_bar = [one for one in kept if one.keep != _KEEP_BAR]
    for shown in (kept, without_bar):
        room = width - sum(one.width + len(GAP) for one in shown if one.heading != "tricks")
        if room >= _LEAST_FOR_TRICKS:
            return shown, room
    return kept, 0


def _of_gpu(plans: Plans) -> str:
    """Return the heading of the bars, which stand for the whole GPU."""
    return f"of {format_bytes(plans.capacity_bytes)}"


def _ratio_in_words(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def _legend(plans: Plans, glyphs: Glyphs, headings: Collection[str]) -> str:
    """Return what the columns that are there mean."""
    used, bar_, free = (glyphs.bar[part] for part in ("mine", "rest", "free"))
    stabilities = dict.fromkeys(plan.stability for plan in plans)
    meanings = ", ".join(f"{_STABILITY[one][0]} = {_IN_WORDS[one]}" for one in stabilities)
    of_column = {
        "time": "time: the recommended plan is 1.00 x.",
        "update": f"update: {meanings}.",
        _of_gpu(plans): f"{used} memory, {bar_} error bar, {free} free.",
        "host": "host: memory beside the GPU, for what is offloaded.",
    }
    return " ".join(said for heading, said in of_column.items() if heading in headings)


def _print_all_gpus(console: Console, plans: Plans) -> None:
    """Say what more GPUs than recommended would give."""
    best, most = plans.best, max(plan.gpus for plan in plans)
    if best is None or most == best.gpus:
        return
    ratios = zip(plans, plans.time_ratios, strict=True)
    found, ratio = next((plan, ratio) for plan, ratio in ratios if plan.gpus == most)
    step_s = found.prediction.step_s
    if ratio is None or step_s is None:
        gain = "a step's time is unknown"
    else:
        gain = f"a step takes {format_time(step_s)}, {1 / ratio:.1f} x as fast as on {best.gpus}"
    words = ", ".join(_names(found)) or "as it is"
    print_prose(console, f"With {most} GPUs ({words}): {gain}.")


def bar(glyphs: Glyphs, plan: Plan, capacity_bytes: int) -> str:
    """Draw the memory used, the error bar and what is left, to scale."""
    scale = _BAR_WIDTH / max(capacity_bytes, 1)
    taken = min(round(plan.prediction.device_bytes * scale), _BAR_WIDTH)
    most = min(round(plan.prediction.high_bytes * scale), _BAR_WIDTH)
    sizes = {"mine": taken, "rest": most - taken, "free": _BAR_WIDTH - most}
    return "".join(glyphs.bar[part] * size for part, size in sizes.items())


# ---- below the table -----------------------------------------------------------------------------


def _print_tricks(console: Console, best: Plan) -> None:
    if best.tricks:
        print_prose(console, "what to change:", "bold")
    for trick in best.tricks:
        print_prose(console, f"{trick.name}: {trick.what}", indent=2)
        print_prose(console, trick.code, "cyan", indent=4)
        if trick.caveat:
            print_prose(console, trick.caveat, "dim", indent=4)


def _print_rejected(console: Console, rejected: Sequence[Rejected]) -> None:
    """Print rejected plans, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for one in rejected:
        by_reason.setdefault(one.why.replace(f"--allow {one.what}", "--allow"), []).append(one.what)
    for why, names in by_reason.items():
        print_prose(console, f"not considered: {', '.join(names)} ({why})", "dim")


def _print_compared(console: Console, plans: Plans, *, explains: bool) -> None:
    """Say in one line how much was compared, and what was not."""
    names = [one.what for one in plans.rejected if not explains]
    without = f", without {', '.join(names)}: --explain says why" if names else ""
    print_prose(console, f"Compared {plans.num_candidates} variants{without}.", "dim")


def _cut_in_words(cut: Cut) -> str:
    """Return what the time limit left out.

    >>> print(_cut_in_words(Cut(limit_s=60, left_out=("bf16",))).partition(". ")[0])
    The search was cut after 1 min; 1 combination is not compared: bf16
    """
    num, named = len(cut.left_out), "; ".join(cut.left_out[:_MOST_LEFT_OUT])
    more = "" if num <= _MOST_LEFT_OUT else f"; and {num - _MOST_LEFT_OUT} more"
    are = "combination is" if num == 1 else "combinations are"
    return (
        f"The search was cut after {format_duration(cut.limit_s)}; {num} {are} not compared:"
        f" {named}{more}. A higher --time-limit goes on with them."
    )


def _print_shortfall(console: Console, plans: Plans) -> None:
    """Say how near the nearest plan comes, and what would be enough for it."""
    short: Shortfall | None = plans.shortfall
    if short is None:
        return
    if short.variant is None or short.device_bytes is None:  # written by an older oomph
        print_prose(console, "Nothing is certain to fit.", "bold red")
    else:
        words = _set_by(short.variant, _names_in(short.variant), _is_batch_known(plans))
        taken = _of(short.device_bytes, plans.capacity_bytes)
        nothing = "Nothing is" if plans.cut is None else "Nothing that was compared is"
        said = f"{nothing} certain to fit. Closest: {words}: {taken}."
        print_prose(console, said, "bold red")
    missing = format_bytes(short.missing_bytes)
    share = format_ratio(short.missing_bytes / max(plans.capacity_bytes, 1))
    lacks = f"It needs {missing} more ({share} of the GPU)"
    print_prose(console, f"{lacks}. Its largest part: {short.largest_part}.", indent=2)
    if short.smallest_gpu:
        print_prose(console, f"The smallest GPU for it: {short.smallest_gpu}.", indent=2)
    if short.num_gpus:
        flag = f"--max-gpus {short.num_gpus}"
        said = f"Or about {short.num_gpus} of these GPUs, with the model sharded: {flag}."
        print_prose(console, said, indent=2)
    if short.beyond_sharding:
        print_prose(console, short.beyond_sharding, indent=2)


def _names_in(variant: Variant) -> list[str]:
    return named_tricks((trick.name for trick in tricks_on(variant)), variant)


def _print_offers(console: Console, plans: Plans) -> None:
    """Print what a change of training would give, each with its flag and its price."""
    if not plans.offers:
        return
    print_prose(console, "if you let training change:", "bold")
    for offer in plans.offers:
        print_prose(console, f"--allow {offer.allow}: {_given_by(offer, plans)}", indent=2)
        print_prose(console, _price_of(offer, plans), "dim", indent=4)
    console.print()


def _given_by(offer: Offer, plans: Plans) -> str:
    figures = [_of(offer.device_bytes, plans.capacity_bytes)]
    if offer.step_s is not None:
        figures.append(f"{format_time(offer.step_s)} a step")
    if offer.time_ratio is not None:
        figures.append(f"{offer.time_ratio:.2f} x the time")
    if offer.host_bytes:
        figures.append(f"{format_bytes(offer.host_bytes)} of host memory")
    return ", ".join(figures)


def _price_of(offer: Offer, plans: Plans) -> str:
    words = _set_by(offer.variant, _names_in(offer.variant), _is_batch_known(plans))
    said = f"{offer.price} ({words})"
    if offer.fits == "uncertain":
        said += "; uncertain"
    elif offer.fits == "no":
        said += f"; {format_bytes(offer.missing_bytes)} too much"
    if offer.fits != "yes" and offer.smallest_gpu:
        said += f"; the smallest GPU for it: {offer.smallest_gpu}"
    return said


# ---- the page of `oomph plan --html` -------------------------------------------------------------

_DIGITS = 6  # digits of a position: a step has fewer than a million events
_OWN_BATCH = "is_own_batch"  # in the plans as a whole, and in each variant


def write_plan_page(
    plans: Plans, timelines: Sequence[Timeline | None], code: Sequence[str], path: Path | str
) -> None:
    """Write the page, completely or not at all. `timelines` and `code` have one entry per plan."""
    write_whole(path, plans_page(plans, timelines, code))


def plans_page(plans: Plans, timelines: Sequence[Timeline | None], code: Sequence[str]) -> str:
    """Return the page of all plans."""
    return filled_page("plan", plan_data(plans, timelines, code))


def plan_page(plan: Plan, code: str) -> str:
    """Return the page of one plan, without the others that it was compared with."""
    data = _of_plan(plan)
    data["plans"][0]["code"] = code
    return filled_page("plan", data)


def plan_data(
    plans: Plans, timelines: Sequence[Timeline | None], code: Sequence[str]
) -> dict[str, Any]:
    """Return the page's data: the record, and with each plan its timeline and code.

    If a script's batch size is unknown, the numbers of a split mean nothing; this is marked.
    """
    from oomph import __version__

    own = {_OWN_BATCH: not _is_batch_known(plans)}
    record = to_jsonable(replace(plans, timelines=()))  # each plan gets its own below
    data = {"schema": SCHEMA, "version": __version__, **record, **own}
    for plan, timeline, text in zip(data["plans"], timelines, code, strict=True):
        plan |= {"timeline": _drawable(timeline), "code": text}
        plan["variant"] |= own
    return data


def _drawable(timeline: Timeline | None) -> dict[str, Any] | None:
    """Return the timeline with each op named once: there are far fewer names than positions."""
    if timeline is None:
        return None
    names = {op: number for number, op in enumerate(dict.fromkeys(timeline.ops))}
    return {
        **to_jsonable(timeline),
        "positions": [round(position, _DIGITS) for position in timeline.positions],
        "phases": [[round(position, _DIGITS), phase] for position, phase in timeline.phases],
        "ops": [names[op] for op in timeline.ops],
        "op_names": list(names),
    }


# ---- files of plans, read back for `oomph serve --plans` -----------------------------------------
# A page written by `oomph plan --html` holds its plans as JSON, with their timelines; a file
# written by `oomph plan -o` holds one plan. Only data is taken from either, and only what is
# understood.

# See html_page.py.
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def plan_files(directory: Path, most: int) -> list[Path]:
    """Return the files that may hold plans, newest first."""
    found = [
        path
        for path in directory.iterdir()
        if path.suffix in (".html", ".json") and path.is_file() and not path.name.startswith(".")
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:most]


def read_plan_file(path: Path) -> dict[str, Any]:
    """Return what the page of plans shows. Raises Unreadable if the file holds no plan."""
    if path.suffix == ".json":
        return _of_plan(from_json_file(Plan, path, what="plan"))
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise ValueError(f"it is larger than {LARGEST_FILE_BYTES} bytes")
        return _of_page(content.decode("utf-8"))
    except OSError as error:
        raise Unreadable(f"{path} cannot be read", because=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise no_record("plan", path, str(error)) from None


def summary_of(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Return one line of a list of plans."""
    best = data["plans"][0] if data["plans"] else None
    return {
        "name": path.name,
        "written_at": path.stat().st_mtime,
        "workload": data["workload"],
        "gpu": data["gpu"],
        "batch_size": data["batch_size"],
        "num_plans": len(data["plans"]),
        "device_bytes": best and best["prediction"]["device_bytes"],
        "capacity_bytes": data["capacity_bytes"],
        "why": best and best["why"],
    }


def _of_page(text: str) -> dict[str, Any]:
    """Return a page's data. Raises ValueError unless it is a valid record of this version."""
    found = _DATA.search(text)
    if found is None:
        raise ValueError("it is not a page of plans")
    data: dict[str, Any] = json.loads(found[1], parse_constant=_refuse)
    record = _without(data, "schema", "version", _OWN_BATCH)
    record.setdefault("offers", [])  # a page of an older oomph has neither
    record.setdefault("cut", None)
    if isinstance(record.get("shortfall"), dict):
        later = ("variant", "device_bytes", "high_bytes", "step_s", "beyond_sharding")
        record["shortfall"] = {**dict.fromkeys(later), **record["shortfall"]}
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}, which this oomph reads")
    if isinstance(record.get("plans"), list):
        plans = [_without(plan, "timeline", "code") for plan in record["plans"]]
        variants = [_without(plan.get("variant"), _OWN_BATCH) for plan in plans]
        pairs = zip(plans, variants, strict=True)
        record["plans"] = [{**plan, "variant": variant} for plan, variant in pairs]
    from_jsonable(Plans, record)
    return data


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _without(value: object, *names: str) -> dict[str, Any]:
    """Return a JSON object without the keys that a page adds."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is not a JSON object")
    return {name: item for name, item in value.items() if name not in names}


def _of_plan(plan: Plan) -> dict[str, Any]:
    from oomph import __version__

    return {
        "schema": SCHEMA,
        "version": __version__,
        "workload": plan.workload,
        "gpu": plan.gpu,
        "batch_size": plan.batch_size,
        "capacity_bytes": plan.prediction.capacity_bytes,
        "fits_as_is": None,  # unknown from a single plan
        "as_is": None,
        "plans": [{**to_jsonable(plan), "timeline": None, "code": ""}],
        "rejected": [],
        "shortfall": None,
        "offers": [],
        "cut": None,
        "caveats": [],
        "num_candidates": None,
    }
