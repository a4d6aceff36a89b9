"""The name of a GPU -> its GpuModel: datasheet figures, also for GPUs that are not here.

    find("a100 80")                                   what a person typed
    find_by_nvml_name("NVIDIA A100-SXM4-80GB", ...)   what a driver says

The figures are in catalog.json, each with its source. Limits: GPUs of NVIDIA only. Laptop GPUs, MIG
slices and vGPUs share a name with a larger chip and are never mistaken for it; the laptop GPUs that
are known are products of their own. A name is read as product, form factor and memory size; nothing
else is guessed.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from oomph.errors import UnknownGpu
from oomph.records.gpu_model import Found, GpuModel
from oomph.units import GIB, parse_bytes

# ---- catalog.json -> GpuModel, grouped into the products that share a name.

# Longer than any driver's name; hostile input cannot cost much time.
MAX_NAME_LENGTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU of the catalogue, with the parts of its name."""

    model: GpuModel
    form: str  # "SXM4"; empty if the product has only one
    size_gb: int
    sold_as_gb: int | None  # the advertised size, where less is usable

    @property
    def is_sxm(self) -> bool:
        return self.form.startswith("SXM")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The GPUs that share a name, such as every A100."""

    title: str
    spelling: str  # without the brand
    brand: tuple[str, ...]  # leading words that may be left out
    architecture: str
    cards: tuple[Card, ...]


def spell(text: str) -> str:
    """Normalise a name: lower case, and a space only between two numbers.

    >>> spell("RTX-4070 Ti_SUPER"), spell("a100 80GB")
    ('rtx4070tisuper', 'a100 80gb')
    """
    runs = re.findall(r"[a-z]+|[0-9]+", text[:MAX_NAME_LENGTH].lower())
    return re.sub(r"(?<=[^0-9]) | (?=[^0-9])", "", " ".join(runs))


def without(words: Iterable[str], spelling: str) -> str:
    for word in words:
        spelling = spelling.removeprefix(word)
    return spelling


# ---- reading the file


def _giga(value: float) -> int:
    return round(value * 10**9)


def _tera(value: float) -> float:
    return float(round(value * 10**12))


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


# Key in the file -> field of GpuModel, and the conversion from the datasheet's unit to ours.
FIGURES: Mapping[str, tuple[str, Callable[[Any], object]]] = {
    "memory_gb": ("memory_bytes", lambda gb: gb * GIB),
    "measured": ("measured_bytes", parse_bytes),
    "bandwidth_gb_per_s": ("memory_bandwidth_bytes_per_s", _giga),
    "fp32_tflops": ("fp32_flops", _tera),
    "tf32_tflops": ("tf32_flops", _tera),
    "fp16_tflops": ("fp16_flops", _tera),
    "bf16_tflops": ("bf16_flops", _tera),
    "matmul_bf16_tflops": ("matmul_bf16_flops", _tera),
    "num_sms": ("num_sms", int),
    "compute_capability": ("compute_capability", _capability),
    "nvlink_gb_per_s": ("nvlink_bytes_per_s", _giga),
    "pcie": ("pcie", str),
}


@functools.cache
def file_content() -> dict[str, Any]:
    text = Path(__file__).with_name("catalog.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@functools.cache
def products() -> tuple[Product, ...]:
    by_title: dict[str, list[dict[str, Any]]] = {}
    for entry in file_content()["gpus"]:
        by_title.setdefault(entry["product"], []).append(entry)
    return tuple(_product(title, entries) for title, entries in by_title.items())


def _product(title: str, entries: Sequence[dict[str, Any]]) -> Product:
    brand = tuple(entries[0].get("brand", "").split())
    return Product(
        title=title,
        spelling=without(brand, spell(title)),
        brand=brand,
        architecture=entries[0]["architecture"],
        cards=tuple(
            Card(
                model=_model(entry),
                form=entry.get("form", ""),
                size_gb=entry["memory_gb"][0],
                sold_as_gb=entry.get("sold_as_gb"),
            )
            for entry in entries
        ),
    )


def _model(entry: dict[str, Any]) -> GpuModel:
    figures: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, (name, convert) in FIGURES.items():
        written = entry.get(key)
        figures[name] = None
        if written == "none":
            origins[name] = "none: the hardware has no such unit, or no fast one"
        elif written is not None:
            value, origins[name] = written
            figures[name] = convert(value)
    return GpuModel(
        name=entry["name"],
        title=entry["title"],
        architecture=entry["architecture"],
        note=entry.get("note"),
        sources=origins,
        **figures,
    )


_NUM_NEAREST = 5  # names that an error lists; judgement

# Letters, digits, and the separators people and web pages use (U+2010 to U+2015 are hyphens).
_PLAIN = re.compile(r"[a-z0-9\s_/.,()\u2010-\u2015-]*")

# What may follow the product. A digit after "sxm" or "hbm" is a version only if no other digit
# follows: "sxm4 80gb" is SXM4, "sxm 80gb" is SXM.
_DETAIL = re.compile(
    r" ?(?:(?P<form>sxm(?:\d(?!\d))?|pcie|nvl|ws|workstation)"
    r"|(?P<size_gb>\d{1,4})(?:gib|gb|g(?!pu))?"
    r"|(?P<architecture>kepler|maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell)"
    r"|hbm(?:\d(?!\d)e?)?|gpu|generation|edition|ac)"  # ac: air-cooled, "B300 SXM6 AC"
)

# Share of the nameplate size that a driver reports. ECC in GDDR memory leaves the least: a T4 has
# 15.0 of 16 GB. The upper bound only allows for rounding. Sizes of one product differ by more.
_LEAST_USABLE_RATIO = 0.90
_MOST_USABLE_RATIO = 1.02

_LAPTOP = re.compile(r"laptop|maxq")
# Other words for them, as `spell` writes them: drivers say "with Max-Q Design".
_LAPTOP_WORDS = (
    (re.compile(r"mobile|notebook"), "laptop"),
    (re.compile(r"withmaxqdesign"), "maxq"),
)
_OTHER_MAKERS = re.compile(
    r"amd|radeon|instinct|rx ?\d|mi ?\d{2,3}|intel|arc ?[ab]|gaudi|apple|tpu"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name:
    """A parsed name; None marks what the text left open."""

    product: Product
    form: str | None
    size_gb: int | None


def all_models() -> tuple[GpuModel, ...]:
    """Return every GPU of the catalogue, oldest architecture first."""
    return tuple(card.model for product in products() for card in product.cards)


def sources() -> Mapping[str, str]:
    """Return what each tag in `GpuModel.sources` stands for."""
    legend: dict[str, str] = file_content()["sources"]
    return legend


def find(text: str) -> Found:
    """Return the GPU a person means. Open choices are made cautiously, and named in `assumed`.

    >>> find("RTX 4090").model.name, find("a100 80").model.name, find("3080ti").model.name
    ('rtx4090', 'a100-80gb', 'rtx3080-ti')
    >>> find("rtx 3080").assumed
    'RTX 3080 comes with 10 and 12 GB: taken as 10 GB; say rtx3080-12gb for the other'
    """
    named = _read(text)
    if named is None:
        raise _unknown(text)
    fitting = [card for card in named.product.cards if _has_form(card, named.form)]
    fitting = [card for card in fitting if _has_size(card, named.size_gb)]
    if not fitting:
        raise _no_such_variant(named)
    chosen = _cautious(fitting)
    return Found(model=chosen.model, assumed=_assumption(named, chosen, fitting))


def find_by_nvml_name(name: str, total_bytes: int | None) -> GpuModel | None:
    """Return the GPU with that driver name; None if it is not in the catalogue or ambiguous.

    If `total_bytes` is known, it decides the size. Names leave the size out ("NVIDIA GeForce RTX
    3060"), or mean other memory ("NVIDIA GH200 480GB" gives the CPU's).

    >>> find_by_nvml_name("NVIDIA A100-SXM4-80GB", None).name
    'a100-80gb'
    >>> find_by_nvml_name("NVIDIA GeForce RTX 4090 Laptop GPU", None).name
    'rtx4090-laptop'
    """
    named = _read(name)
    if named is None:
        return None
    fitting = [card for card in named.product.cards if _has_form(card, named.form)]
    if total_bytes is not None:
        fitting = [card for card in fitting if _could_total(card.model, total_bytes)]
    else:
        fitting = [card for card in fitting if _has_size(card, named.size_gb)]
    if len({card.size_gb for card in fitting}) != 1:
        return None
    return _cautious(fitting).model


# ---- reading a name


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_NAME_LENGTH and _PLAIN.fullmatch(text.lower()) is not None


def _read(text: str) -> _Name | None:
    """Parse a name; None if it names no product, or says more than product, form and size."""
    if not _is_plain(text):
        return None
    spelling = _with_one_word_for_laptops(spell(text))
    return next(filter(None, (_read_as(product, spelling) for product in products())), None)


def _with_one_word_for_laptops(spelling: str) -> str:
    for words, word in _LAPTOP_WORDS:
        spelling = words.sub(word, spelling)
    return spelling


def _read_as(product: Product, spelling: str) -> _Name | None:
    core = without(("nvidia", *product.brand), spelling)
    details = core.removeprefix(product.spelling)
    if details == core or re.match(r"\d\d", product.spelling[-1] + details):  # L40 is not an L4
        return None
    return _read_details(product, details)


def _read_details(product: Product, details: str) -> _Name | None:
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
    return _Name(
        product=product,
        form=next(iter(found["form"]), None),
        size_gb=next((int(size) for size in found["size_gb"]), None),
    )


def _has_form(card: Card, form: str | None) -> bool:
    if form is None:
        return True
    if not card.form:  # the product has only one form: PCIe, if its slot is known
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
    """Return the smallest: what fits there fits on the others. Then prefer SXM, else the first."""
    return min(cards, key=lambda card: (card.size_gb, not card.is_sxm))


def _assumption(named: _Name, chosen: Card, fitting: Sequence[Card]) -> str | None:
    if named.size_gb not in (None, chosen.size_gb):
        return (
            f"{named.product.title} is sold with {named.size_gb} GB, of which {chosen.size_gb} GB "
            f"are usable: taken as {chosen.size_gb} GB"
        )
    if named == _read(chosen.model.name):
        return None
    others = [card for card in fitting if _figures(card.model) != _figures(chosen.model)]
    if not others:
        return None
    options, taken = _what_differs(chosen, others)
    names = _in_words([card.model.name for card in others], "or")
    rest = "the other" if len(others) == 1 else "another"
    asked = f"{named.product.title} {chosen.form}" if named.form else named.product.title
    return f"{asked} comes {options}: taken as {taken}; say {names} for {rest}"


def _what_differs(chosen: Card, others: Sequence[Card]) -> tuple[str, str]:
    """Return ("with 40 and 80 GB, as SXM4 and PCIe", "40 GB, SXM4"), as far as they differ."""
    cards = [chosen, *others]
    sizes = sorted({card.size_gb for card in cards})
    forms = list(dict.fromkeys(card.form for card in cards))
    options, taken = [], []
    if len(sizes) > 1:
        options.append(f"with {_in_words(map(str, sizes), 'and')} GB")
        taken.append(f"{chosen.size_gb} GB")
    if len(forms) > 1:
        options.append(f"as {_in_words(forms, 'and')}")
        taken.append(chosen.form)
    return ", ".join(options), ", ".join(taken)


def _figures(model: GpuModel) -> tuple[object, ...]:
    """Return the figures a prediction could depend on."""
    words = {"name", "title", "sources", "note", "measured_bytes"}
    return tuple(getattr(model, each.name) for each in fields(model) if each.name not in words)


def _in_words(items: Iterable[str], conjunction: str) -> str:
    *heads, last = items
    return f"{', '.join(heads)} {conjunction} {last}" if heads else last


# ---- the error for an unknown name


def _no_such_variant(named: _Name) -> UnknownGpu:
    product = named.product
    size = f" with {named.size_gb} GB" if named.size_gb is not None else ""
    form = f" as {named.form.upper()}" if named.form else ""
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
    spelling = _with_one_word_for_laptops(spell(text))
    if not text.strip():
        return UnknownGpu("no GPU is named", because="the name is empty")
    if not _is_plain(text):
        return UnknownGpu(
            f"{shown!r} is not the name of a GPU",
            because=f"a name is up to {MAX_NAME_LENGTH} letters, digits and separators",
            nearest=_nearest(spelling),
        )
    if _LAPTOP.search(spelling):
        because = (
            "a laptop GPU is a smaller chip than the card of its name, and this one is not in it"
        )
        nearest = tuple(name for name in _nearest(spelling) if _LAPTOP.search(spell(name)))
        return UnknownGpu(f"the catalogue has no GPU {shown!r}", because=because, nearest=nearest)
    if _OTHER_MAKERS.match(spelling):
        return UnknownGpu(f"the catalogue has no GPU {shown!r}", because="it has NVIDIA's only")
    several = _containing(spelling)
    if len(several) > 1:
        return UnknownGpu(
            f"{shown!r} could be several GPUs",
            because=f"it is a part of {len(several)} names of the catalogue",
            nearest=several[:_NUM_NEAREST],
        )
    because = f"none of its {len(all_models())} GPUs has that name"
    return UnknownGpu(
        f"the catalogue has no GPU {shown!r}", because=because, nearest=_nearest(spelling)
    )


def _containing(spelling: str) -> tuple[str, ...]:
    """Return the GPUs whose name contains the text, those that begin with it first."""
    part = spelling.removeprefix("nvidia")
    if not part:
        return ()
    holding = [known for known in _spellings() if part in known]
    holding.sort(key=lambda known: not known.startswith(part))
    return tuple(dict.fromkeys(_spellings()[known] for known in holding))


def _nearest(spelling: str) -> tuple[str, ...]:
    known = _spellings()
    # Each GPU has several spellings, so ask for more than are shown.
    close = difflib.get_close_matches(spelling.removeprefix("nvidia"), known, n=15, cutoff=0.5)
    names = (*_containing(spelling), *(known[each] for each in close))
    return tuple(dict.fromkeys(names))[:_NUM_NEAREST]


@functools.cache
def _spellings() -> Mapping[str, str]:
    """Map each spelling of name, title and product to the first GPU that has it."""
    known: dict[str, str] = {}
    for product in products():
        for card in product.cards:
            model = card.model
            for spelling in (spell(model.name), spell(model.title), product.spelling):
                known.setdefault(spelling, model.name)
    return known


# ---- GpuModel -> the name that a driver and torch give such a GPU.
# Scripts choose by it: `"A100" in torch.cuda.get_device_name()`. The rules follow real machines'
# names in the catalogue's tests. A GPU without an example there is named by the rules of its kind.

_SIZE = re.compile(r" \d+GB$")
_OF_GAMERS = re.compile(r"(RTX|GTX) \d{4}")
_OF_FORM = re.compile(r"(?P<chip>\w+) (?P<form>SXM\d|PCIe) (?P<size>\d+GB)")
# Exceptions to the rules, as seen on real machines.
_OWN = {
    "a100-pcie-80gb": "NVIDIA A100 80GB PCIe",
    "h100-80gb": "NVIDIA H100 80GB HBM3",
    "h100-pcie-80gb": "NVIDIA H100 PCIe",
    "h100-nvl": "NVIDIA H100 NVL",
    "h200": "NVIDIA H200",
    "h200-nvl": "NVIDIA H200 NVL",
    "gh200": "NVIDIA GH200 480GB",
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300 SXM6 AC",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
}


def driver_name(model: GpuModel) -> str:
    """Return the name as nvidia-smi and torch.cuda.get_device_name() give it."""
    if model.name in _OWN:
        return _OWN[model.name]
    title = model.title
    if "Max-Q" in title or "Laptop" in title:
        return _laptop_name(title)
    is_ada = "Ada" in title
    if _OF_GAMERS.match(title) and not is_ada:
        return f"NVIDIA GeForce {_SIZE.sub('', title)}"
    if title.startswith("Tesla"):
        return f"Tesla {_with_form(title.removeprefix('Tesla '))}"
    if title.startswith("Titan"):
        return f"NVIDIA {title.upper()}"
    if title.startswith("Quadro"):
        return title
    if is_ada:
        return f"NVIDIA {title} Generation"
    return f"NVIDIA {_with_form(title)}"


def _laptop_name(title: str) -> str:
    title = (
        _SIZE.sub("", title).replace("Max-Q", "with Max-Q Design").replace("Laptop", "Laptop GPU")
    )
    if title.startswith("Quadro"):
        return title
    return f"NVIDIA GeForce {title}" if _OF_GAMERS.match(title) else f"NVIDIA {title}"


def _with_form(title: str) -> str:
    """Return the title with its form: A100 SXM4 40GB becomes A100-SXM4-40GB."""
    found = _OF_FORM.fullmatch(title)
    if found is None:
        return title
    return f"{found['chip']}-{found['form'].upper()}-{found['size']}"
