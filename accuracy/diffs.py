"""How many public script styles get a whole patch from `oomph plan --diff`, verified.

    python -m accuracy.diffs                # plan, patch, apply and rehearse all styles
    python -m accuracy.diffs unet_amp.py    # one of them, with its changes
    python -m accuracy.diffs --keep         # keep the results, also of one, for the documentation

Each style is planned for an RTX 4090 of which only a part of what it needs may be used. The diff is
applied to a copy of the scripts by `git apply`, and the copy is rehearsed with the arguments.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from oomph.records.plan import Plan, PlanOptions
from oomph.records.prediction import Prediction
from oomph.records.script import Script, ScriptChanges
from oomph.tricks.trick import tricks_on
from oomph.units import format_bytes

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "scripts"
KEPT = Path(__file__).with_name("diffs.json")
GPU = "rtx4090"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    name: str
    script: str
    arguments: tuple[str, ...] = ()
    ratio: float = 0.65  # of what it needs as it is: so much of the GPU may be used


STYLES = (
    Style(
        name="MNIST, as in pytorch/examples",
        script="mnist_cnn.py",
        arguments=("--batch-size", "4096"),
    ),
    Style(name="U-Net with --amp", script="unet_amp.py"),
    Style(name="ViT, autocast, rates by hand", script="vit_bf16.py"),
    Style(
        name="word language model",
        script="lstm_lm.py",
        arguments=("--batch_size", "256"),
        ratio=0.9,
    ),
    Style(name="ImageNet, as in pytorch/examples", script="resnet_imagenet.py"),
    Style(name="nanoGPT", script="nano_gpt.py"),
    Style(name="Hugging Face Trainer", script="hf_trainer.py", arguments=("--output_dir", "out")),
    Style(name="Lightning", script="lightning_resnet.py"),
    Style(name="accelerate", script="accelerate_loop.py"),
    Style(
        name="YAML file and overrides",
        script="train_from_config.py",
        arguments=("--config", "configs/audio_base.yaml"),
    ),
    Style(name="nanoGPT with configurator.py, 5 * 8", script="more/gpt_configurator.py"),
    Style(name="llm.c's train_gpt2.py", script="more/gpt2_total_batch.py"),
    Style(name="run_glue_no_trainer", script="more/glue_no_trainer.py"),
    Style(name="accelerate's nlp_example", script="more/nlp_example.py"),
    Style(name="timm's train.py", script="more/image_trainer.py"),
    Style(name="segmentation in a Solver", script="more/segmentation.py"),
    Style(name="LoRA by hand", script="more/lora_by_hand.py"),
    Style(name="diffusers' text to image", script="more/text_to_image.py"),
    Style(name="the first BERT examples", script="more/bert_classifier.py"),
    Style(name="DCGAN", script="dcgan.py"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one style."""

    style: str
    plan: str
    answer: str  # "arguments", "patch", "patch and arguments", "part of it"
    planned_bytes: int
    patched_bytes: int | None  # of the copy with the changes
    is_whole: bool  # complete, applied and verified by a second rehearsal
    left: str = ""  # what is not as planned


def run(style: Style) -> tuple[Row, ScriptChanges | None]:
    """Plan a style, apply the changes to a copy and rehearse that."""
    from oomph.verbs.plan import plan_with_options

    script = _script(style, SCRIPTS, style.arguments)
    as_it_is = _predicted(script)
    capacity_bytes = int(as_it_is.device_bytes * style.ratio)
    plans = plan_with_options(
        script, PlanOptions(), gpu=GPU, gpu_memory=capacity_bytes, effort="rehearsed"
    )
    if plans.best is None or plans.changes is None:
        row = Row(
            style=style.name,
            plan="none fits",
            answer="none",
            planned_bytes=capacity_bytes,
            patched_bytes=None,
            is_whole=False,
            left="no plan fits",
        )
        return row, None
    return _row(style, plans.best, plans.changes), plans.changes


def _row(style: Style, plan: Plan, changes: ScriptChanges) -> Row:
    patched = changes.patched
    differences = () if patched is None else patched.differences
    errors = () if patched is None or patched.error is None else (patched.error,)
    applied = _of_copy(style, changes)
    is_same = patched is not None and applied == patched.device_bytes
    left = [*changes.by_hand, *differences, *errors]
    if not is_same and not errors:
        left.append(f"the copy needs {applied}, not {patched and patched.device_bytes} bytes")
    return Row(
        style=style.name,
        plan=_in_words(plan),
        answer=_kind(changes, style.arguments),
        planned_bytes=plan.prediction.device_bytes,
        patched_bytes=applied,
        is_whole=bool(patched and patched.is_as_planned and changes.is_whole and is_same),
        left="; ".join(left),
    )


def _of_copy(style: Style, changes: ScriptChanges) -> int | None:
    """Return what a copy of the scripts needs once the diff is applied to it."""
    from oomph.errors import OomphError

    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "scripts")
        shutil.copytree(SCRIPTS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if changes.diff:
            subprocess.run(  # by git, as a user would
                ["git", "apply", "-"],  # noqa: S607
                cwd=copy,
                input=changes.diff,
                text=True,
                check=True,
            )
        try:
            return _predicted(_script(style, copy, changes.arguments)).device_bytes
        except OomphError:
            return None


def _script(style: Style, directory: Path, arguments: Sequence[str]) -> Script:
    return Script(path=style.script, arguments=tuple(arguments), directory=str(directory))


def _predicted(script: Script) -> Prediction:
    from oomph.verbs.predict import predict

    return predict(script, gpu=GPU)


def _in_words(plan: Plan) -> str:
    variant = plan.variant
    split = f"{variant.micro_batch} x {variant.accumulation}"
    names = [trick.name for trick in tricks_on(variant) if trick.name != "accumulation"]
    return ", ".join([split, *names])


def _kind(changes: ScriptChanges, given: Sequence[str]) -> str:
    if not changes.is_whole:
        return "part of it"
    parts = ["patch"] * bool(changes.diff) + ["arguments"] * (changes.arguments != tuple(given))
    return " and ".join(parts) or "nothing to change"


# ---- the table -----------------------------------------------------------------------------------


def kept() -> list[Row]:
    """Return the results as of the last `--keep`."""
    return [Row(**row) for row in json.loads(KEPT.read_text())]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| script, in the style of | plan | answer | planned | patched script | verified |",
        "|---|---|---|--:|--:|---|",
    ]
    for row in rows:
        patched = "" if row.patched_bytes is None else format_bytes(row.patched_bytes)
        planned = format_bytes(row.planned_bytes)
        verified = "yes" if row.is_whole else "no"
        cells = (row.style, row.plan, row.answer, planned, patched, verified)
        lines.append(f"| {' | '.join(cells)} |")
    num_whole = sum(row.is_whole for row in rows)
    lines += ["", f"{num_whole} of {len(rows)} get whole changes, verified."]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    names = [word for word in arguments if not word.startswith("-")]
    rows = []
    for style in STYLES:
        if names and style.script not in names:
            continue
        row, changes = run(style)
        rows.append(row)
        print(f"{'whole' if row.is_whole else 'NOT'}: {row}", flush=True)
        if names and changes is not None:
            print(changes.arguments, *changes.tried, changes.diff, sep="\n")
    print(table(rows))
    if "--keep" in arguments:
        own = {row.style: row for row in (*(kept() if KEPT.exists() else ()), *rows)}
        every = [asdict(own[style.name]) for style in STYLES if style.name in own]
        KEPT.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
