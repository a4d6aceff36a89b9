"""plan.json: what is saved is what is loaded, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from planning.plans import any_plans, plan_of, whatever_it_takes

from oomph.errors import EXIT_UNREADABLE, Unreadable, UsageError
from oomph.exporting.planned import Planned, load_plan
from oomph.records import stored
from oomph.records.plan import Plan


@whatever_it_takes
@given(any_plans)
def test_a_plan_comes_back_as_it_was_saved(plan: Planned) -> None:
    assert stored.from_json(Planned, stored.as_json(plan)) == plan


def test_a_file_holds_the_plan(tmp_path: Path) -> None:
    plan = plan_of(checkpointing="blocks:0,3", expandable_segments=True)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == stored.SCHEMA


def test_any_plan_gets_the_exports() -> None:
    plan = plan_of()
    bare = Plan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
    assert Planned.of(bare) == plan


def test_a_plan_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        plan_of().save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def saved(tmp_path: Path, **changes: Any) -> Path:
    content = json.loads(stored.as_json(plan_of())) | changes
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(Unreadable) as refused:
        load_plan(path)
    assert refused.value.exit_code == EXIT_UNREADABLE
    assert refused.value.attempt
    return f"{refused.value.what}: {refused.value.because}"


@pytest.mark.parametrize("schema", [None, 0, 2, "1", 1.5, True, []])
def test_another_schema_is_refused(tmp_path: Path, schema: object) -> None:
    assert "its schema is" in refusal(saved(tmp_path, schema=schema))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", None),
        ("gpu", 5),
        ("variant", []),
        ("tricks", {}),
        ("tricks", [5]),
        ("stability", "sure"),
        ("stability", ["same"]),
        ("relative_time", "1.0"),
        ("relative_time", True),
        ("recommended", 1),
        ("why", ["it is"]),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(
    tmp_path: Path, field: str, value: object
) -> None:
    assert field in refusal(saved(tmp_path, **{field: value}))


def test_a_setting_deep_inside_is_named(tmp_path: Path) -> None:
    content = json.loads(stored.as_json(plan_of()))
    variant = content["variant"] | {"micro_batch": 4.5}
    assert "variant.micro_batch is 4.5" in refusal(saved(tmp_path, variant=variant))


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch": 0},
        {"accumulation": -1},
        {"num_gpus": 0},
        {"optimizer": "faster"},
        {"optimizer_in_backward": True},
        {"checkpointing": "blocks:0]:\n        import os  #"},
    ],
    ids=str,
)
def test_a_way_to_train_that_nobody_could_have_planned_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    content = json.loads(stored.as_json(plan_of()))
    assert "is not a plan" in refusal(saved(tmp_path, variant=content["variant"] | change))


def test_every_field_is_needed_and_no_other_is_taken(tmp_path: Path) -> None:
    def paths(value: Any, start: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        if not is_dataclass(value):
            return []
        own = [(*start, field.name) for field in fields(value)]
        return own + [path for name in own for path in paths(getattr(value, name[-1]), name)]

    for path in paths(plan_of()):
        content = json.loads(stored.as_json(plan_of()))
        inside = content
        for name in path[:-1]:
            inside = inside[name]
        inside["unheard_of"] = inside.pop(path[-1])
        assert f"{'.'.join(path)} is missing" in refusal(saved_text(tmp_path, json.dumps(content)))
    assert "unheard_of is unknown" in refusal(saved(tmp_path, unheard_of=1))


def saved_text(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"schema": 1}',
        '{"schema": NaN}',
        "[" * 100_000,
        '{"schema": ' + "9" * 10_000 + "}",
        b"\xff\xfe",
        b"\0" * 64,
    ],
    ids=range(10),
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str | bytes) -> None:
    refusal(saved_text(tmp_path, text))


def test_a_number_that_json_does_not_have_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text().replace('"relative_time": 1.25', '"relative_time": Infinity'))
    assert "Infinity" in refusal(path)


def test_a_huge_file_is_refused_without_reading_it_whole() -> None:
    assert "larger than" in refusal(Path("/dev/zero"))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.json")
    assert "Is a directory" in refusal(tmp_path)
