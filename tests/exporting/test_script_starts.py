"""Which starts of a script are tried for a plan: by names and values alone, the likeliest first."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from exporting.script_stage import seen_of
from oomph.exporting.rewriting.diff import code_of, read_sources
from oomph.exporting.rewriting.starts import Start, config_paths, starts
from oomph.records.script import Aspect
from oomph.records.workload import Variant

_PARSER = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=32)
parser.add_argument("--eval-batch-size", type=int, default=32)
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--gradient_checkpointing", action="store_true")
"""


def _starts(
    aspect: Aspect, text: str, given: str = "", configs: Any = None, **variant: Any
) -> list[str]:
    files = read_sources({"train.py": text})
    wanted = Variant(**{"micro_batch": 8, "accumulation": 4, **variant})
    seen = seen_of(micro_batch=32, accumulation=1)
    found = starts(
        aspect,
        code_of(files, seen),
        Start(arguments=tuple(given.split())),
        configs or {},
        seen,
        wanted,
    )
    return [shlex.join(one.arguments) + "".join(text for _, text in one.edited) for one in found]


def test_size_and_accumulation_are_tried_together_then_alone() -> None:
    assert _starts("split", _PARSER) == [
        "--batch-size 8 --grad-accum 4",
        "--grad-accum 4",
        "--batch-size 8",
    ]
    assert _starts("split", _PARSER, "-b 32 --amp")[0] == "-b 8 --amp --grad-accum 4"


def test_a_size_with_another_value_than_was_seen_is_not_tried() -> None:
    assert _starts("split", _PARSER, "-b 64") == ["-b 64 --grad-accum 4"]


def test_switches_of_precision_are_tried_with_its_kind_and_not_those_of_another() -> None:
    assert _starts("precision", _PARSER, precision="bf16") == [
        "--amp",
        "--precision bf16",
        "--amp --precision bf16",
    ]
    assert _starts("precision", _PARSER, precision="fp16") == ["--fp16", "--amp"]
    assert _starts("precision", _PARSER, precision="fp32") == []
    assert _starts("precision", _PARSER, "--amp", precision="bf16") == ["--amp --precision bf16"]


def test_a_switch_of_checkpointing_is_tried_where_blocks_are_to_be_recomputed() -> None:
    assert _starts("checkpointing", _PARSER, checkpointing="blocks") == ["--gradient_checkpointing"]
    assert _starts("checkpointing", _PARSER) == []


def test_globals_that_arguments_override_are_set_as_the_given_ones_are() -> None:
    text = "batch_size = 4 * 8\naccum = 1\nexec(open('configurator.py').read())\n"
    assert _starts("split", text)[0] == "--batch_size=8 --accum=4"
    assert _starts("split", text, "batch_size=32")[0] == "batch_size=8 accum=4"


def test_fields_of_a_dataclass_that_a_parser_fills_are_arguments() -> None:
    text = """from dataclasses import dataclass, field
@dataclass
class Settings:
    train_batch_size: int = field(default=32)
    accumulation: int = 1
(settings,) = HfArgumentParser(Settings).parse_args_into_dataclasses()
"""
    assert _starts("split", text)[0] == "--train_batch_size 8 --accumulation 4"
    in_text = text.replace("HfArgumentParser", "read").replace("field(default=32)", "32")
    both = in_text.replace("= 32", "= 8").replace("accumulation: int = 1", "accumulation: int = 4")
    assert _starts("split", in_text)[0] == both


@pytest.mark.parametrize(
    ("config", "after"),
    [
        ("train:\n  batch_size: 32  # each\n", "train:\n  batch_size: 8  # each\n"),
        ('{\n  "batch_size": 32,\n  "lr": 32\n}', '{\n  "batch_size": 8,\n  "lr": 32\n}'),
        ("batch_size = 32\n", "batch_size = 8\n"),
    ],
)
def test_a_line_of_a_configuration_file_is_changed_and_no_other(config: str, after: str) -> None:
    assert _starts("split", "", configs={"/c.yaml": config}) == ["" + after]


def test_configuration_files_are_those_named_in_the_arguments_and_the_text() -> None:
    files = read_sources({"train.py": "load('base.yaml'); print('x.txt')"})
    code = code_of(files, seen_of())
    assert config_paths(code, ["--config=a.yml", "b.json", "c.py"]) == [
        "a.yml",
        "b.json",
        "base.yaml",
    ]
