"""What to change in a script: only what is certain, all other text as it was, the rest said."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from planning.plans import plan_of, variants, whatever_it_takes

from exporting.script_stage import applied, loader_of, seen_of, split
from oomph.exporting.rewriting.diff import script_changes
from oomph.records.script import Line
from oomph.records.workload import Variant, divides_parameters

AS_IS: dict[str, Any] = {"micro_batch": 32, "accumulation": 1}
LOOP = """import torch

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in batches:
    optimizer.zero_grad()
    out = model(x)
    loss = criterion(out, y)
    accuracy = (out == y).float().mean()
    loss.backward()
    optimizer.step()
"""


def test_a_script_that_trains_as_planned_is_left_alone() -> None:
    changes = split(LOOP, ["--epochs", "3"], **AS_IS)
    assert (changes.diff, changes.arguments, changes.by_hand) == ("", ("--epochs", "3"), ())


# ---- precision -----------------------------------------------------------------------------------


def test_autocast_goes_around_forward_and_loss_and_nothing_else() -> None:
    after = applied(LOOP, split(LOOP, precision="bf16", **AS_IS).diff)
    assert (
        """
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
        loss = criterion(out, y)
    accuracy = (out == y).float().mean()
    loss.backward()
"""
        in after
    )


def test_fp16_gets_a_scaler_that_outlives_an_epoch() -> None:
    text = LOOP.replace("for x, y", "for epoch in range(3):\n  for x, y").replace(
        "\n    ", "\n      "
    )
    text = text.replace("      optimizer.step", "      clip_grad_norm_(p, 1)\n      optimizer.step")
    after = applied(text, split(text, precision="fp16", **AS_IS).diff)
    assert 'scaler = torch.amp.GradScaler("cuda")\nfor epoch' in after
    assert (
        """
      scaler.scale(loss).backward()
      scaler.unscale_(optimizer)
      clip_grad_norm_(p, 1)
      scaler.step(optimizer)
      scaler.update()
"""
        in after
    )


def test_a_script_that_has_autocast_already_keeps_it() -> None:
    assert split(LOOP, seen=seen_of(precision="bf16"), precision="bf16", **AS_IS).diff == ""


def test_autocast_of_the_script_is_switched_on_by_its_own_flag() -> None:
    text = """import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
for x in data:
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
"""
    changes = split(text, ["-v"], precision="fp16", **AS_IS)
    assert (changes.diff, changes.arguments, changes.by_hand) == ("", ("-v", "--amp"), ())
    other = split(text, precision="bf16", **AS_IS)
    assert other.arguments == ("--amp",)
    assert "dtype=torch.bfloat16, enabled=args.amp" in applied(text, other.diff)


@pytest.mark.parametrize("loss", ["nn.BCELoss()", "F.binary_cross_entropy(out, y)"])
def test_a_loss_that_autocast_refuses_is_named(loss: str) -> None:
    text = LOOP.replace("criterion(out, y)", loss)
    changes = split(text, precision="bf16", **AS_IS)
    assert changes.diff == ""
    assert "train.py:8" in changes.by_hand[0]
    assert "refused within autocast" in changes.by_hand[0]


def test_tf32_is_switched_on_below_the_imports() -> None:
    after = applied(LOOP, split(LOOP, precision="tf32", **AS_IS).diff)
    assert after.startswith('import torch\n\ntorch.set_float32_matmul_precision("high")\n')
    assert split(after, precision="tf32", **AS_IS).diff == ""
    both = split(LOOP, precision="tf32", expandable_segments=True, **AS_IS)
    names = [type(one).__name__ for one in ast.parse(applied(LOOP, both.diff)).body]
    assert names[:5] == ["Import", "Expr", "Expr", "Import", "Expr"]


def test_offloaded_activations_go_around_forward_and_loss() -> None:
    changes = split(LOOP, offload_activations=True, **AS_IS)
    assert changes.by_hand == ()
    after = applied(LOOP, changes.diff)
    assert after.startswith("import torch\nimport oomph\n")
    assert (
        """
    with oomph.offloaded_activations():
        out = model(x)
        loss = criterion(out, y)
    accuracy"""
        in after
    )


# ---- the optimizer, the allocator, checkpointing -------------------------------------------------


@pytest.mark.parametrize(
    ("made", "optimizer", "expected"),
    [
        ("AdamW(p)", "fused", "AdamW(p, fused=True)"),
        ("AdamW(p,)", "fused", "AdamW(p, fused=True)"),
        ("AdamW(p, foreach=True)", "fused", "AdamW(p, foreach=False, fused=True)"),
        ("AdamW(p, fused = False)", "fused", "AdamW(p, fused = True)"),
        ("AdamW(p, fused=x)", "for-loop", "AdamW(p, fused=False, foreach=False)"),
        ("AdamW((p))", "foreach", "AdamW((p), foreach=True)"),
        ("AdamW(\n\tp,\n\tlr=1,  # é\n)", "fused", "AdamW(\n\tp,\n\tlr=1,  # é\n\tfused=True,\n)"),
        ("AdamW(p  # all\n)", "fused", "AdamW(p, fused=True  # all\n)"),
    ],
)  # fmt: skip
def test_the_optimizer_gets_its_keyword(made: str, optimizer: str, expected: str) -> None:
    head = "import torch\noptimizer = torch.optim."
    text = f"{head}{made}  # mine\n"
    changes = split(text, optimizer=optimizer, **AS_IS)
    assert applied(text, changes.diff) == f"{head}{expected}  # mine\n"


@pytest.mark.parametrize(
    ("made", "seen"),
    [("AdamW(p, **more)", "AdamW"), ("RMSprop(p)", "RMSprop"), ("make(p)", "AdamW")],
)
def test_an_optimizer_that_may_not_take_it_is_left(made: str, seen: str) -> None:
    text = f"optimizer = torch.optim.{made}\n"
    changes = split(text, (), seen_of(optimizer=seen), optimizer="fused", **AS_IS)
    assert changes.diff == ""
    assert "fused=True" in changes.by_hand[0]


def test_an_optimizer_that_is_so_already_is_left() -> None:
    text = "optimizer = torch.optim.AdamW(p, fused=torch.cuda.is_available())\n"
    assert split(text, (), seen_of(is_fused=True), optimizer="fused", **AS_IS).diff == ""


def test_segments_are_set_before_anything_is_imported() -> None:
    text = '"""Doc."""\nfrom __future__ import annotations\n\nimport torch\n'
    after = applied(text, split(text, expandable_segments=True, **AS_IS).diff)
    names = [type(one).__name__ for one in ast.parse(after).body]
    assert names == ["Expr", "ImportFrom", "Import", "Expr", "Expr", "Import"]
    assert split(after, expandable_segments=True, **AS_IS).diff == ""


def test_another_setting_of_the_allocator_is_not_overwritten() -> None:
    text = 'import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"\n'
    changes = split(text, expandable_segments=True, **AS_IS)
    assert changes.diff == ""
    assert "add expandable_segments:True to it" in changes.by_hand[0]


def test_a_model_of_transformers_checkpoints_its_blocks() -> None:
    text = """from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained(
    "gpt2",
).cuda()
net = AutoModelForCausalLM.from_pretrained("gpt2")
"""
    after = applied(text, split(text, checkpointing="blocks", **AS_IS).diff)
    assert after == text + 'net.gradient_checkpointing_enable({"use_reentrant": False})\n'


def test_the_blocks_of_another_model_are_for_the_user() -> None:
    changes = split(LOOP, checkpointing="blocks", **AS_IS)
    assert changes.diff == ""
    assert "names of the model's parts are not known" in changes.by_hand[0]
    own = split(LOOP, (), seen_of(checkpointing="by the script"), checkpointing="blocks", **AS_IS)
    assert own.by_hand == ()


def test_two_optimizers_and_two_backwards_are_for_the_user() -> None:
    text = LOOP + "    critic(x).backward()\n    other.step()\n"
    seen = seen_of(num_optimizers=2, lines=(Line(what="backward", file="train.py", line=10),))
    changes = split(text, (), seen, precision="bf16", optimizer="fused")
    assert changes.diff == ""
    assert [sentence.partition(":")[0] for sentence in changes.by_hand] == [
        "8 examples at a time, 4 times for each step (the batch stays 32)",
        "autocast to bf16",
        "optimizer",
    ]


def test_a_line_is_named_as_the_user_has_it() -> None:
    text = (
        LOOP.replace("AdamW", "Rprop")
        .replace("batches", "loader")
        .replace("model =", "loader = DataLoader(data, 32, shuffle=True)\nmodel =", 1)
    )
    seen = seen_of(optimizer="Rprop", loader=loader_of(32))
    changes = split(text, (), seen, optimizer="fused", expandable_segments=True)
    assert changes.diff
    [sentence] = changes.by_hand
    assert "train.py:5: `torch.optim.Rprop(" in sentence


# ---- where a size comes from ---------------------------------------------------------------------

OPTIONS = """import argparse
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--batches", type=int)
    parser.add_argument("--lr", type=float)
    return parser.parse_args()
def main(args):
    loader = DataLoader(data, batch_size=args.batch_size, drop_last=True)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
main(options())
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "--batch-size 8"),
        ("--lr 1", "--lr 1 --batch-size 8"),
        ("--batch-size 32 --lr 1", "--batch-size 8 --lr 1"),
        ("--lr 1 --batch-size=32", "--lr 1 --batch-size=8"),
        ("-b 32", "-b 8"),
        ("-b32", "-b8"),
        ("--batch-s 32", "--batch-s 8"),
        ("--batches 32", "--batches 32 --batch-size 8"),
        ("-- 32", "--batch-size 8 -- 32"),
    ],
)
def test_an_option_is_given_instead_of_an_edit(given: str, expected: str) -> None:
    changes = split(OPTIONS, given.split(), seen_of(loader=loader_of(32)))
    assert changes.by_hand == ()
    assert " ".join(changes.arguments) == expected
    assert "batch_size" not in [one for one in changes.diff.splitlines() if one[0] in "+-"]


def test_an_option_with_another_value_than_was_seen_is_not_trusted() -> None:
    changes = split(OPTIONS, ["-b", "64"], seen_of(loader=loader_of(32)))
    assert (changes.diff, changes.arguments) == ("", ("-b", "64"))
    assert "its batch_size, args.batch_size, is to be 8" in changes.by_hand[0]


@pytest.mark.parametrize(
    "change",
    [
        "args.batch_size //= 2",
        "args.batch_size = 64",
        'config["batch_size"] = 1',
        "setup(parser.add_subparsers())",
    ],
)
def test_an_option_that_is_changed_elsewhere_is_not_trusted(change: str) -> None:
    changes = split(f"{OPTIONS}{change}\n", (), seen_of(loader=loader_of(32)))
    assert (changes.diff, changes.arguments) == ("", ())
    assert len(changes.by_hand) == 1


# As nanoGPT has it: arguments are read by a file that is executed, and set globals of their names.
GLOBALS = """batch_size = 16
gradient_accumulation_steps = 5 * 8
exec(open("configurator.py").read())
if ddp:
    gradient_accumulation_steps //= world_size

def get_batch(split):
    return [data[split] for _ in range(batch_size)]

for _ in range(100):
    for micro_step in range(gradient_accumulation_steps):
        loss = model(get_batch("train"))
        loss = loss / gradient_accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_TWICE = seen_of(accumulation=2)  # 32 examples, two times


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "--batch_size=32 --gradient_accumulation_steps=2",
            "--batch_size=8 --gradient_accumulation_steps=8",
        ),
        (
            "wide.py --batch_size=16 --lr=1 --gradient_accumulation_steps=2 --batch_size=32",
            "wide.py --batch_size=16 --lr=1 --gradient_accumulation_steps=8 --batch_size=8",
        ),
        (
            "batch_size=32 gradient_accumulation_steps=2",
            "batch_size=8 gradient_accumulation_steps=8",
        ),
    ],
)
@pytest.mark.parametrize("how", [GLOBALS, GLOBALS.replace("exec(open", "globals().update(read")])
def test_an_argument_that_sets_a_global_gets_the_new_value(
    how: str, given: str, expected: str
) -> None:
    changes = split(how, given.split(), _TWICE, micro_batch=8, accumulation=8)
    assert (changes.diff, changes.by_hand) == ("", ())
    assert " ".join(changes.arguments) == expected


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (GLOBALS, "--batch_size=64 --gradient_accumulation_steps=2"),  # another than was seen
        (GLOBALS, "--batch_size=32"),  # 5 * 8 or a part of it, which were not seen
        (GLOBALS.replace("= 16", "= 32"), "wide.py --gradient_accumulation_steps=2"),  # may set it
        (  # is that of its callers, who differ
            GLOBALS.replace("get_batch(split)", "get_batch(split, batch_size)").replace(
                'get_batch("train")', 'get_batch("train", 32) + get_batch("more", 0)'
            ),
            "--batch_size=32 --gradient_accumulation_steps=2",
        ),
        (GLOBALS.replace("exec(", "print("), "--batch_size=32 --gradient_accumulation_steps=2"),
    ],
)
def test_an_argument_that_may_not_set_a_global_is_left(text: str, given: str) -> None:
    changes = split(text, given.split(), _TWICE, micro_batch=8, accumulation=8)
    assert (changes.diff, " ".join(changes.arguments)) == ("", given)
    assert "where it comes from is not certain" in changes.by_hand[0]


def test_a_global_that_no_argument_sets_is_changed_where_it_stands() -> None:
    text = GLOBALS.replace("if ddp:\n    gradient_accumulation_steps //= world_size\n", "")
    seen = seen_of(micro_batch=16, accumulation=40)
    changes = split(text, ["--lr=1"], seen, micro_batch=8, accumulation=80)
    assert applied(text, changes.diff).startswith(
        "batch_size = 8\ngradient_accumulation_steps = 80\n"
    )
    assert (changes.arguments, changes.by_hand) == (("--lr=1",), ())


def test_a_size_in_another_file_is_changed_there() -> None:
    sources = {
        "train.py": OPTIONS.replace("args.batch_size", "config.BATCH").replace(
            "import argparse", "import argparse, config"
        ),
        "config.py": "LR = 1\nBATCH = 32  # of each step\n",
    }
    changes = script_changes(
        sources, (), seen_of(loader=loader_of(32)), plan_of(micro_batch=8, accumulation=4)
    )
    assert changes.by_hand == ()
    assert "-BATCH = 32  # of each step\n+BATCH = 8  # of each step\n" in changes.diff
    assert "--- a/train.py\n" in changes.diff
    assert "--- a/config.py\n" in changes.diff


def test_a_size_from_a_file_that_is_not_python_is_for_the_user() -> None:
    text = OPTIONS.replace("args.batch_size", 'yaml.safe_load(open("a.yaml"))["batch_size"]')
    changes = split(text, (), seen_of(loader=loader_of(32)))
    assert (changes.diff, changes.arguments) == ("", ())
    assert "train.py:9" in changes.by_hand[0]


@pytest.mark.parametrize(
    "line",
    [
        "total = 1000 // args.batch_size",
        "total = math.ceil(1000 / args.batch_size)",
        "for at in range(0, 1000, args.batch_size): pass",
    ],
)
def test_steps_that_are_counted_by_the_size_of_a_batch_are_not_certain(line: str) -> None:
    text = OPTIONS.replace("    loader =", f"    {line}\n    loader =")
    changes = split(text, (), seen_of(loader=loader_of(32)))
    assert (changes.diff, changes.arguments) == ("", ())
    assert "counts batches by their size" in changes.by_hand[0]


# ---- tools ---------------------------------------------------------------------------------------


def test_training_arguments_get_what_differs() -> None:
    text = """from transformers import Seq2SeqTrainingArguments
args = Seq2SeqTrainingArguments(
    "out",
    per_device_train_batch_size=32,
    fp16=False,
    optim="adamw_torch",
    learning_rate=3e-5,  # tuned
)
"""
    plan: dict[str, Any] = {"precision": "fp16", "checkpointing": "every-2", "optimizer": "fused"}
    after = applied(text, split(text, **plan).diff)
    assert (
        after
        == """from transformers import Seq2SeqTrainingArguments
args = Seq2SeqTrainingArguments(
    "out",
    per_device_train_batch_size=8,
    fp16=True,
    optim="adamw_torch_fused",
    learning_rate=3e-5,  # tuned
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={'use_reentrant': False, 'every_n_layers': 2},
)
"""
    )


def test_training_arguments_of_the_command_line_are_given_there() -> None:
    transformers = pytest.importorskip("transformers")
    text = """from transformers import HfArgumentParser, TrainingArguments
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
"""
    given = ["--output_dir", "o", "--bf16", "--per_device_train_batch_size=32", "--use_cpu"]
    plan: dict[str, Any] = {"precision": "fp32", "checkpointing": "blocks"}
    changes = split(text, given, **plan)
    assert (changes.diff, changes.by_hand) == ("", ())
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(list(changes.arguments))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 4)
    assert (args.bf16, args.gradient_checkpointing) == (False, True)
    assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_accelerate_without_accumulate_is_for_the_user() -> None:
    text = "accelerator = Accelerator()\nloader = DataLoader(d, 32)\n"
    changes = split(text, (), seen_of(loader=loader_of(32)))
    assert changes.diff == ""
    assert "with accelerator.accumulate(model):" in changes.by_hand[0]


@pytest.mark.parametrize(
    "made",
    [
        "accelerator = (\n    Accelerator(log_with='all') if tracked else Accelerator()\n)\n",
        "if a:\n accelerator = Accelerator(log_with='all')\nelse:\n accelerator = Accelerator()\n",
    ],
)
def test_both_accelerators_of_a_conditional_are_changed(made: str) -> None:
    text = f"{made}loader = DataLoader(d, 32)\nwith accelerator.accumulate(model):\n    pass\n"
    changes = split(text, (), seen_of(loader=loader_of(32)), precision="bf16")
    assert changes.by_hand == ()
    after = applied(text, changes.diff)
    settings = 'mixed_precision="bf16", gradient_accumulation_steps=4)'
    assert f"Accelerator(log_with='all', {settings}" in after
    assert f"Accelerator({settings}" in after
    assert "DataLoader(d, 8)" in after


def test_two_accelerators_of_their_own_are_for_the_user() -> None:
    text = "one = Accelerator()\nother = Accelerator()\nloader = DataLoader(d, 32)\n"
    changes = split(text, (), seen_of(loader=loader_of(32)), precision="bf16")
    assert changes.diff == ""
    assert "2 calls of Accelerator could be the training's" in changes.by_hand[0]


def test_lightning_that_optimizes_by_hand_is_for_the_user() -> None:
    text = "import lightning as L\nself.automatic_optimization = False\nL.Trainer(max_epochs=1)\n"
    changes = split(text)
    assert changes.diff == ""
    assert "optimizes by itself" in changes.by_hand[0]


# ---- whatever comes ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\0'\n", "", "# nothing\n", "\ufeffx = 1\n"])
def test_a_file_in_which_nothing_is_found_is_left(text: str) -> None:
    changes = split(text)
    assert changes.diff == ""
    assert changes.by_hand


def test_a_mark_of_the_order_of_bytes_stays_first() -> None:
    text = "\ufeffimport torch\n"
    after = applied(text, split(text, expandable_segments=True, **AS_IS).diff)
    assert after.startswith("\ufeffimport os\n")
    assert after.endswith("\nimport torch\n")


@whatever_it_takes
@given(variants())
def test_every_plan_is_said_one_way_or_another(variant: Variant) -> None:
    settings = {name: getattr(variant, name) for name in Variant.__dataclass_fields__}
    seen = seen_of(micro_batch=variant.batch_size, loader=loader_of(variant.batch_size))
    text = LOOP.replace("batches", "loader").replace(
        "model =", f"loader = DataLoader(data, {variant.batch_size}, shuffle=True)\nmodel =", 1
    )
    plan = plan_of(**settings)
    changes = script_changes({"train.py": text}, (), seen, plan)
    if changes.diff:
        ast.parse(applied(text, changes.diff))
    said = changes.diff + "\n".join(changes.by_hand)
    told = {
        "autocast": variant.precision in ("bf16", "fp16"),
        "bf16": variant.precision == "pure-bf16",
        "matmul_precision": variant.precision == "tf32",
        "checkpoint": variant.checkpointing != "none",
        "torchrun": variant.num_gpus > 1,
        "expandable_segments": variant.expandable_segments,
        "offloaded_activations": variant.offload_activations,
        # FSDP has its own, which its settings switch on.
        "CPUOffloadOptimizer": variant.offload_optimizer and not divides_parameters(variant),
        "ZeRO-Offload": variant.zero_offload,
        "fused=True": variant.optimizer == "fused",
        "AdamW8bit": variant.optimizer == "8-bit",
        "peft": variant.adapters != "none",
        "sdpa": variant.attention == "sdpa",
    }
    assert [words for words, is_on in told.items() if is_on and words not in said] == []


def test_a_loop_of_accelerate_can_get_torchs_autocast_instead() -> None:
    text = """import torch
accelerator = Accelerator(mixed_precision=args.precision)
loader = DataLoader(d, 32)
for x in loader:
    with accelerator.accumulate(model):
        out = model(x)
        loss = criterion(out)
        accelerator.backward(loss)
        optimizer.step()
"""
    seen = seen_of(loader=loader_of(32), lines=(Line(what="forward", file="train.py", line=6),))
    plan = plan_of(micro_batch=8, accumulation=4, precision="bf16")
    changes = script_changes({"train.py": text}, (), seen, plan, autocasts=True)
    assert changes.by_hand == ()
    after = applied(text, changes.diff)
    assert "mixed_precision=args.precision, gradient_accumulation_steps=4)" in after
    assert (
        """
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
            loss = criterion(out)
        accelerator.backward(loss)
"""
        in after
    )
