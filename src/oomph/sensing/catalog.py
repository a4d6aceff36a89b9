"""The name of a GPU -> its GpuModel: datasheet figures for GPUs that we do not have.

    find("a100 80")                                   what a person typed
    find_by_nvml_name("NVIDIA A100-SXM4-80GB", ...)   what a driver says

The figures stand in catalog.json, each with its source. Limits: desktop,
workstation and data-centre GPUs of NVIDIA only. Laptop GPUs, MIG slices and
vGPUs share a name with a larger chip, so they are never taken for it. A name is
read as product, form factor and memory size; nothing is guessed beyond these.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from oomph.errors import UnknownGpu
from oomph.records.catalog import Found, GpuModel
from oomph.sensing.catalog_file import (
    MAX_NAME_LENGTH,
    Card,
    Product,
    file_content,
    products,
    spell,
    without,
)

_NUM_NEAREST = 5

# Letters, digits, and what people and web pages put between them (U+2010 to U+2015 are hyphens).
_PLAIN = re.compile(r"[a-z0-9\s_/.,()\u2010-\u2015-]*")

# What may follow the product. A digit after "sxm" or "hbm" is a version only if it stands
# alone: "sxm4 80gb" is SXM4, "sxm 80gb" is SXM.
_DETAIL = re.compile(
    r" ?(?:(?P<form>sxm(?:\d(?!\d))?|pcie|nvl|ws|workstation)"
    r"|(?P<size_gb>\d{1,4})(?:gib|gb|g(?!pu))?"
    r"|(?P<architecture>kepler|maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell)"
    r"|hbm(?:\d(?!\d)e?)?|gpu|generation|edition|ac)"  # ac: air-cooled, "B300 SXM6 AC"
)

# What a driver leaves of the nameplate. With ECC in GDDR memory it is the least: a T4 with
# 15.0 of 16 GB. The upper bound is for rounding only. Sizes of one product are further apart.
_LEAST_USABLE_RATIO = 0.90
_MOST_USABLE_RATIO = 1.02

_LAPTOP = re.compile(r"laptop|mobile|notebook")
_OTHER_MAKERS = re.compile(
    r"amd|radeon|instinct|rx ?\d|mi ?\d{2,3}|intel|arc ?[ab]|gaudi|apple|tpu"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """A text, read: None is what it left open."""

    product: Product
    form: str | None
    size_gb: int | None


def all_models() -> tuple[GpuModel, ...]:
    """Every GPU of the catalogue, oldest architecture first."""
    return tuple(card.model for product in products() for card in product.cards)


def sources() -> Mapping[str, str]:
    """What each tag in `GpuModel.sources` stands for."""
    legend: dict[str, str] = file_content()["sources"]
    return legend


def find(text: str) -> Found:
    """The GPU that a person means; what the text leaves open is taken cautiously, and said.

    >>> find("RTX 4090").model.name, find("a100 80").model.name, find("3080ti").model.name
    ('rtx4090', 'a100-80gb', 'rtx3080-ti')
    >>> find("rtx 3080").assumed
    'RTX 3080 comes with 10 and 12 GB: taken as 10 GB; say rtx3080-12gb for the other'
    """
    wish = _read(text)
    if wish is None:
        raise _unknown(text)
    fitting = [card for card in wish.product.cards if _has_form(card, wish.form)]
    fitting = [card for card in fitting if _has_size(card, wish.size_gb)]
    if not fitting:
        raise _no_such_variant(wish)
    chosen = _cautious(fitting)
    return Found(model=chosen.model, assumed=_assumption(wish, chosen, fitting))


def find_by_nvml_name(name: str, total_bytes: int | None) -> GpuModel | None:
    """The GPU that a driver names so; None if it is not in the catalogue, or could be two of it.

    The size is judged by `total_bytes` where it is known: names leave it out ("NVIDIA GeForce
    RTX 3060"), or mean other memory ("NVIDIA GH200 480GB" counts that of the CPU).

    >>> find_by_nvml_name("NVIDIA A100-SXM4-80GB", None).name
    'a100-80gb'
    >>> find_by_nvml_name("NVIDIA GeForce RTX 4090 Laptop GPU", None) is None
    True
    """
    wish = _read(name)
    if wish is None:
        return None
    fitting = [card for card in wish.product.cards if _has_form(card, wish.form)]
    if total_bytes is not None:
        fitting = [card for card in fitting if _could_total(card.model, total_bytes)]
    else:
        fitting = [card for card in fitting if _has_size(card, wish.size_gb)]
    if len({card.size_gb for card in fitting}) != 1:
        return None
    return _cautious(fitting).model


# --- reading a name ---------------------------------------------------------------------------


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_NAME_LENGTH and _PLAIN.fullmatch(text.lower()) is not None


def _read(text: str) -> _Wish | None:
    """None if the text names no product, or says more than product, form and size."""
    if not _is_plain(text):
        return None
    spelling = spell(text)
    return next(filter(None, (_read_as(product, spelling) for product in products())), None)


def _read_as(product: Product, spelling: str) -> _Wish | None:
    core = without(("nvidia", *product.brand), spelling)
    details = core.removeprefix(product.spelling)
    if details == core or re.match(r"\d\d", product.spelling[-1] + details):  # l40 is not an L4
        return None
    return _read_details(product, details)


def _read_details(product: Product, details: str) -> _Wish | None:
    found: dict[str, set[str]] = {"form": set(), "size_gb": set(), "architecture": set()}
    at = 0
    while at < len(details):
        part = _DETAIL.match(details, at)
        if part is None:
            return None
        at = part.end()
        if part.lastgroup:
            found[part.lastgroup].add(part[part.lastgroup])
    if not found["architecture"] <= {product.architecture.lower()}:
        return None
    if len(found["form"]) > 1 or len(found["size_gb"]) > 1:  # "a100 40gb 80gb"
        return None
    return _Wish(
        product=product,
        form=next(iter(found["form"]), None),
        size_gb=next((int(size) for size in found["size_gb"]), None),
    )


def _has_form(card: Card, form: str | None) -> bool:
    if form is None:
        return True
    if not card.form:  # the only form there is: a slot, if it is known to have one
        return form == "pcie" and card.model.pcie is not None
    if form == "workstation":
        return card.form == "WS"
    own = card.form.lower()
    return form in (own, own.rstrip("0123456789")) or form.rstrip("0123456789") == own


def _has_size(card: Card, size_gb: int | None) -> bool:
    return size_gb is None or size_gb in (card.size_gb, card.sold_as_gb)


def _could_total(model: GpuModel, total_bytes: int) -> bool:
    ratio = total_bytes / model.memory_bytes
    return _LEAST_USABLE_RATIO <= ratio <= _MOST_USABLE_RATIO


def _cautious(cards: Sequence[Card]) -> Card:
    """The smallest, as what fits there fits on the larger one; of these SXM, else the first."""
    return min(cards, key=lambda card: (card.size_gb, not card.is_sxm))


def _assumption(wish: _Wish, chosen: Card, fitting: Sequence[Card]) -> str | None:
    if wish.size_gb not in (None, chosen.size_gb):
        return (
            f"{wish.product.title} is sold with {wish.size_gb} GB, of which {chosen.size_gb} GB "
            f"are usable: taken as {chosen.size_gb} GB"
        )
    if wish == _read(chosen.model.name):
        return None
    others = [card for card in fitting if _figures(card.model) != _figures(chosen.model)]
    if not others:
        return None
    ways, taken = _what_differs(chosen, others)
    names = _in_words([card.model.name for card in others], "or")
    rest = "the other" if len(others) == 1 else "another"
    asked = f"{wish.product.title} {chosen.form}" if wish.form else wish.product.title
    return f"{asked} comes {ways}: taken as {taken}; say {names} for {rest}"


def _what_differs(chosen: Card, others: Sequence[Card]) -> tuple[str, str]:
    """("with 40 and 80 GB, as SXM4 and PCIe", "40 GB, SXM4"), as far as each differs."""
    cards = [chosen, *others]
    sizes = sorted({card.size_gb for card in cards})
    forms = list(dict.fromkeys(card.form for card in cards))
    ways, taken = [], []
    if len(sizes) > 1:
        ways.append(f"with {_in_words(map(str, sizes), 'and')} GB")
        taken.append(f"{chosen.size_gb} GB")
    if len(forms) > 1:
        ways.append(f"as {_in_words(forms, 'and')}")
        taken.append(chosen.form)
    return ", ".join(ways), ", ".join(taken)


def _figures(model: GpuModel) -> tuple[object, ...]:
    """What a prediction could depend on."""
    words = {"name", "title", "sources", "note", "measured_bytes"}
    return tuple(getattr(model, each.name) for each in fields(model) if each.name not in words)


def _in_words(items: Iterable[str], conjunction: str) -> str:
    *heads, last = items
    return f"{', '.join(heads)} {conjunction} {last}" if heads else last


# --- what to say when there is none -----------------------------------------------------------


def _no_such_variant(wish: _Wish) -> UnknownGpu:
    product = wish.product
    size = f" with {wish.size_gb} GB" if wish.size_gb is not None else ""
    form = f" as {wish.form.upper()}" if wish.form else ""
    known = [_title_with_size(card) for card in product.cards]
    return UnknownGpu(
        f"the catalogue has no {product.title}{size}{form}",
        because=f"it has {_in_words(known, 'and')}",
        nearest=tuple(card.model.name for card in product.cards)[:_NUM_NEAREST],
    )


def _title_with_size(card: Card) -> str:
    title = card.model.title
    return title if title.endswith("GB") else f"{title} with {card.size_gb} GB"


def _unknown(text: str) -> UnknownGpu:
    shown = text if len(text) <= MAX_NAME_LENGTH else text[: MAX_NAME_LENGTH // 2] + "..."
    spelling = spell(text)
    if not text.strip():
        return UnknownGpu("no GPU is named", because="the name is empty")
    if not _is_plain(text):
        return UnknownGpu(
            f"{shown!r} is not the name of a GPU",
            because=f"a name is up to {MAX_NAME_LENGTH} letters, digits and separators",
            nearest=_nearest(spelling),
        )
    if _LAPTOP.search(spelling):
        because = "a laptop GPU is a smaller chip than the card of its name, and none is in it"
        return UnknownGpu(f"the catalogue has no GPU {shown!r}", because=because)
    if _OTHER_MAKERS.match(spelling):
        return UnknownGpu(f"the catalogue has no GPU {shown!r}", because="it has NVIDIA's only")
    several = _containing(spelling)
    if len(several) > 1:
        return UnknownGpu(
            f"{shown!r} could be several GPUs",
            because=f"it is a part of {len(several)} names of the catalogue",
            nearest=several[:_NUM_NEAREST],
        )
    because = f"none of its {len(all_models())} GPUs is called so"
    return UnknownGpu(
        f"the catalogue has no GPU {shown!r}", because=because, nearest=_nearest(spelling)
    )


def _containing(spelling: str) -> tuple[str, ...]:
    """The GPUs that the text is a part of, those that begin with it first."""
    part = spelling.removeprefix("nvidia")
    if not part:
        return ()
    holding = [known for known in _spellings() if part in known]
    holding.sort(key=lambda known: not known.startswith(part))
    return tuple(dict.fromkeys(_spellings()[known] for known in holding))


def _nearest(spelling: str) -> tuple[str, ...]:
    known = _spellings()
    # Each GPU has several spellings, so more are asked for than are shown.
    close = difflib.get_close_matches(spelling.removeprefix("nvidia"), known, n=15, cutoff=0.5)
    names = (*_containing(spelling), *(known[each] for each in close))
    return tuple(dict.fromkeys(names))[:_NUM_NEAREST]


@functools.cache
def _spellings() -> Mapping[str, str]:
    """Each spelling of name, title and product -> the name of the first GPU that has it."""
    known: dict[str, str] = {}
    for product in products():
        for card in product.cards:
            model = card.model
            for spelling in (spell(model.name), spell(model.title), product.spelling):
                known.setdefault(spelling, model.name)
    return known
