"""The name of a model -> a file with a Workload that trains it, for those who have no script yet.

The file is an ordinary one, which the user can open, copy and change. models_by_name.json has the
configurations of common models, with their published number of parameters, which a test counts
again. Others are read from a config.json, as data: nothing of a model's repository is executed.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from oomph.errors import Unreadable, UsageError
from oomph.store import Store, digest

Task = Literal["causal-lm", "masked-lm", "images"]

PREFIX = "hf:"
_STORE = Store("models", most_entries=100)
_CONFIGURATIONS = Path(__file__).with_name("models_by_name.json")
_LARGEST_CONFIG_BYTES = 1 << 20  # judgement: a config.json has a few kilobytes
# Where a user who names no length starts. Judgement: what many recipes fine-tune with.
_USUAL_LENGTH, _USUAL_BATCH = 1024, 8
_POSITIONS = ("max_position_embeddings", "n_positions")
# Their positions are counted from 2 on: 514 of them are for 512 tokens.
_SHIFTED, _SHIFT = ("roberta", "xlm-roberta", "camembert"), 2
_AUTO_CLASSES: Mapping[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "images": "AutoModelForImageClassification",
}
_ENDINGS: Mapping[str, Task] = {  # of the class in config.json's "architectures"
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForImageClassification": "images",
}
_TEXT = """\
def batch(n):
    tokens = torch.zeros(n, {length}, dtype=torch.long)
    return {{"input_ids": tokens, "labels": tokens}}
"""
_IMAGES = """\
def batch(n):
    size = getattr(CONFIG, "image_size", 224)
    images = torch.zeros(n, getattr(CONFIG, "num_channels", 3), size, size)
    return {{"pixel_values": images, "labels": torch.zeros(n, dtype=torch.long)}}
"""
_FILE = '''\
"""{name}, trained in full with AdamW: written by oomph, to be changed as you like."""

import torch
from transformers import AutoConfig, {auto}

import oomph

CONFIG = AutoConfig.for_model({model_type!r}, **{config})
CONFIG.use_cache = False  # as transformers' Trainer does


{batch}


workload = oomph.Workload(
    model=lambda: {auto}.from_config(CONFIG),
    batch=batch,
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-5),
    batch_size={batch_size},
)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A model that is known by its name, or by its config.json."""

    name: str
    task: Task
    config: Mapping[str, Any]  # with its model_type
    num_parameters: int | None = None  # None: not published with it

    @property
    def most_positions(self) -> int | None:
        found = (self.config.get(name) for name in _POSITIONS)
        most = next((one for one in found if isinstance(one, int)), None)
        is_shifted = self.config["model_type"] in _SHIFTED
        return most - _SHIFT if most is not None and is_shifted else most


def is_name(place: str) -> bool:
    return place.startswith(PREFIX)


def workload_file(place: str, *, seq_len: int | None = None, batch_size: int | None = None) -> str:
    """Write the workload of "hf:NAME" and return where it is, as FILE:NAME. Raises UsageError."""
    named = find(place.removeprefix(PREFIX))
    length = length_of(named, seq_len)
    size = _USUAL_BATCH if batch_size is None else batch_size
    text = source(named, length, size)
    label = re.sub(r"[^A-Za-z0-9]+", "_", named.name.rpartition("/")[2]).strip("_")
    shape = f"{size}x{length}" if length else str(size)
    name = f"{label}_{shape}_{digest(text)[:6]}.py"
    _STORE.write(name, text.encode())
    path = _STORE.directory / name
    if not path.is_file():
        raise UsageError(
            f"the workload of {named.name} cannot be written",
            because=f"you may not write to {_STORE.directory}",
            attempt="XDG_CACHE_HOME=DIRECTORY in front of the command",
        )
    return f"{path}:workload"


def source(named: Named, length: int | None, batch_size: int) -> str:
    """Return the text of a file with the workload."""
    config = {key: value for key, value in named.config.items() if key != "model_type"}
    batch = _IMAGES if named.task == "images" else _TEXT
    return _FILE.format(
        name=named.name.replace("\\", "").replace('"', ""),
        auto=_AUTO_CLASSES[named.task],
        model_type=named.config["model_type"],
        config=_as_python(config),
        batch=batch.format(length=length).rstrip(),
        batch_size=batch_size,
    )


def _as_python(config: Mapping[str, Any]) -> str:
    """Return a literal of JSON's values: nothing else can be in it."""
    lines = [f"    {key!r}: {value!r}," for key, value in config.items()]
    return "\n".join(["{", *lines, "}"])


def length_of(named: Named, seq_len: int | None) -> int | None:
    """Return the tokens of a sequence; None for a model of images. Raises UsageError."""
    most = named.most_positions
    if named.task == "images":
        if seq_len is not None:
            raise UsageError(
                f"{named.name} has no sequence length",
                because="it classifies images",
                attempt="leaving --seq-len out",
            )
        return None
    if seq_len is not None and most is not None and seq_len > most:
        raise UsageError(
            f"{named.name} takes no {seq_len} tokens",
            because=f"its configuration has {most} positions",
            attempt=f"--seq-len {most}",
        )
    return seq_len or min(_USUAL_LENGTH, math.inf if most is None else most)  # type: ignore[return-value] # both are int


# ---- finding a model -----------------------------------------------------------------------------


def find(name: str) -> Named:
    """Return a bundled model, or that of a config.json. Raises UsageError and Unreadable."""
    bundled = _bundled()
    if name in bundled:
        return bundled[name]
    short = [one for one in bundled if one.rpartition("/")[2].lower() == name.lower()]
    if short:
        return bundled[short[0]]
    path = Path(name)
    if not name:
        raise UsageError(
            f"no model is named after {PREFIX}",
            because=f"oomph knows {len(bundled)} models, and any config.json",
            attempt=f"{PREFIX}gpt2, or {PREFIX}DIRECTORY of a model",
        )
    if path.is_dir() or path.suffix == ".json":
        return _from_file(path / "config.json" if path.is_dir() else path)
    import difflib

    near = difflib.get_close_matches(name, bundled, n=3, cutoff=0.5)
    raise UsageError(
        f"oomph does not know the model {name!r:.80}",
        because=f"it asks no hub; it knows {len(bundled)} models, and any config.json",
        attempt=", ".join(f"{PREFIX}{one}" for one in near) or f"{PREFIX}DIRECTORY of the model",
    )


@functools.cache
def _bundled() -> Mapping[str, Named]:
    entries = json.loads(_CONFIGURATIONS.read_text("utf-8"))
    return {name: Named(name=name, **entry) for name, entry in entries.items()}


def names() -> tuple[str, ...]:
    """Return the names of the bundled models."""
    return tuple(_bundled())


def _from_file(path: Path) -> Named:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_CONFIG_BYTES + 1)
        if len(content) > _LARGEST_CONFIG_BYTES:
            raise ValueError(f"it is larger than {_LARGEST_CONFIG_BYTES} bytes")
        config = json.loads(content, parse_constant=_refuse)
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError("it names no model_type")
    except OSError as error:
        raise Unreadable(f"{path} cannot be read", because=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(
            f"{path} is not the configuration of a model",
            because=str(error)[:200],
            attempt="the config.json of a model of transformers",
        ) from None
    classes = config.pop("architectures", None)
    class_name = next(iter(classes), None) if isinstance(classes, list) else None
    return Named(name=str(path), task=_task(path, class_name), config=_plain(config))


def _task(path: Path, class_name: object) -> Task:
    found = [task for end, task in _ENDINGS.items() if str(class_name).endswith(end)]
    if found:
        return found[0]
    raise UsageError(
        f"oomph cannot tell what {path} is trained for",
        because=f"its architecture is {class_name or 'not named'}",
        attempt="a Workload of your own: docs/predicting.md",
    )


def _plain(config: dict[str, Any]) -> Mapping[str, Any]:
    """Return the configuration without what names code or files."""
    dropped = ("auto_map", "_name_or_path", "transformers_version", "torch_dtype", "dtype")
    return cast("Mapping[str, Any]", {k: v for k, v in config.items() if k not in dropped})


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
