"""The documents are true: generated parts are current, links lead somewhere, code runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate, pictures

ROOT = generate.ROOT
DOCUMENTS = [
    path
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if ".venv" not in path.parts
]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse lays help out differently")
@pytest.mark.parametrize("document", sorted(generate.GENERATED))
def test_generated_parts_are_what_the_commands_print(document: str) -> None:
    current = (ROOT / document).read_text()
    assert current == generate.up_to_date(document), "run make fix"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_inside_the_repository_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_every_source_file_that_a_document_names_exists() -> None:
    named = re.compile(r"`(?:src/)?(?:oomph/)?((?:[a-z_]+/)*[a-z_]+\.py)`")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for file in named.findall(path.read_text()):
            places = (ROOT / file, ROOT / "src" / "oomph" / file, ROOT / "tests" / file)
            assert "/" not in file or any(place.exists() for place in places), (
                f"{path.name}: {file}"
            )


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.compile(r"\bmake ([a-z]+)\b(?=`|\s+#|\s*$)", re.MULTILINE)
    for path in DOCUMENTS:
        for target in named.findall(path.read_text()):
            assert target in targets, f"{path.name}: make {target}"


def test_every_flag_of_every_verb_is_in_the_manual() -> None:
    manual = (ROOT / "docs" / "cli.md").read_text()
    for verb in generate.verbs():
        done = subprocess.run(
            [sys.executable, "-m", "oomph", verb, "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        for flag in set(re.findall(r"--[a-z-]+", done.stdout)):
            assert flag in manual, flag


def test_every_field_that_json_prints_is_documented() -> None:
    from dataclasses import fields

    from oomph.records.gpu_model import Assumed, Calibrated, Calibration
    from oomph.records.machine import Device, GpuReading, Machine, Process
    from oomph.records.prediction import Moment, Prediction, Unknown
    from oomph.records.workload import Variant

    names = ("reading-gpus.md", "predicting.md")
    documented = "".join((ROOT / "docs" / name).read_text() for name in names)
    records = (
        *(Machine, Device, Process, GpuReading, Prediction, Moment, Unknown, Variant),
        *(Calibrated, Calibration, Assumed),
    )
    for record in records:
        for field in fields(record):
            assert re.search(rf"[`\"]{field.name}[`\"]", documented), f"{record}.{field.name}"


def test_every_field_of_a_verification_is_documented() -> None:
    from dataclasses import fields

    from oomph.records import verification as v
    from oomph.records.alignment import Unmatched

    documented = (ROOT / "docs" / "verifying.md").read_text()
    records = (v.Verification, v.Verified, v.Site, v.Settings, v.Predicted, v.Measured, v.Sequence)
    for record in (*records, v.FirstDifference, v.Located, Unmatched):
        for field in fields(record):
            assert f"`{field.name}`" in documented, f"{record}.{field.name}"


def test_every_field_of_a_plan_is_documented() -> None:
    from dataclasses import fields

    from oomph.records.plan import Offer, Plan, Rejected, Shortfall, Trick
    from oomph.records.prediction import Moment, Prediction, Unknown
    from oomph.records.workload import Variant

    documented = (ROOT / "docs" / "plan-format.md").read_text()
    records = (Plan, Trick, Variant, Prediction, Moment, Unknown, Rejected, Shortfall, Offer)
    for record in records:
        for field in fields(record):
            assert f"`{field.name}`" in documented, f"{record}.{field.name}"


def test_every_field_and_every_finding_of_a_report_is_documented() -> None:
    from dataclasses import fields, is_dataclass
    from typing import get_args

    from oomph.records import report

    documented = (ROOT / "docs" / "reports.md").read_text()
    records = [one for one in vars(report).values() if is_dataclass(one)]
    assert len(records) > 10
    for record in records:
        for field in fields(record):
            assert f"`{field.name}`" in documented, f"{record}.{field.name}"
    endings = ("out-of-memory", "recovered", "not-ended")  # told in words
    for kind in get_args(report.FindingKind):
        assert f"`{kind}`" in documented or kind.endswith(endings), kind


def test_the_python_of_the_readme_uses_names_that_exist() -> None:
    import oomph

    for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "oomph":
                assert hasattr(oomph, node.attr), node.attr


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the picture is drawn by this one")
def test_the_terminal_of_the_readme_is_what_the_command_prints() -> None:
    drawn = pictures.TERMINAL.read_text("utf-8")
    assert drawn == pictures.terminal(), "run python -m docs.pictures"


def test_the_pictures_of_the_readme_are_small_and_shown_first() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (pictures.TERMINAL, pictures.PAGE):
        assert f"]({path.relative_to(ROOT)})" in readme
        assert 0 < path.stat().st_size < pictures.LARGEST_BYTES
    assert readme.index("![") < readme.index("```")


def test_every_page_has_its_place_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in DOCUMENTS:
        if (ROOT / "docs") in path.parents:
            assert str(path.relative_to(ROOT / "docs")) in navigation


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_has_the_two_commands_first() -> None:
    first_code = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first_code
    assert [line.split("#")[0].strip() for line in first_code[1].splitlines()] == [
        "make demo",
        "make test",
    ]
