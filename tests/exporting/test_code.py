"""The exported training loop: it runs, and trains what the plain loop over whole batches trains."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from planning.plans import any_plans, plan_of, whatever_it_takes

from oomph.errors import UsageError
from oomph.exporting.code import as_code
from oomph.exporting.planned import Planned
from oomph.records.workload import OPTIMIZERS, Precision, Sharding
from oomph.tricks.blocks import find_blocks
from oomph.tricks.trick import contradiction_in

# Float64: what is left between two orders of summation is far below any difference that matters.
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


class Net(torch.nn.Module):
    """Four blocks between an embedding and a head, named as nobody expects."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.stack = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)
        )
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.stack:
            x = x + block(x)
        out: torch.Tensor = self.last(x)
        return out


def make_model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def batches(*sizes: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(size, 6, generator=generator, dtype=torch.float64),
            "y": torch.randint(3, (size,), generator=generator),
            "name": "no tensor",
        }
        for size in sizes
    ]


# Three whole batches of 12, and a last one that neither the batch nor the micro-batch divides.
SIZES = (12, 12, 12, 7)


def plainly(make: Any = make_optimizer, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    """The weights after the loop that everybody knows, a whole batch at a time."""
    model = make_model()
    optimizer = make(model.parameters())
    for batch in batches(*sizes):
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def module_of(plan: Planned) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(plan.to_code(), "exported.py", "exec"), names)  # noqa: S102 # what is tested
    return names


def trained(plan: Planned, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    model = module_of(plan)["train"](make_model, make_optimizer, loss_of, batches(*sizes))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch": 12, "accumulation": 1},
        {"micro_batch": 1, "accumulation": 12},
        {"checkpointing": "blocks"},
        {"checkpointing": "every-2"},
        {"checkpointing": "blocks:0,3"},
        {"checkpointing": "selective"},
        {"offload_activations": True},
        {"offload_activations": True, "checkpointing": "blocks"},
        {"offload_optimizer": True},
        {"offload_optimizer": True, "optimizer": "foreach"},
        {"optimizer": "foreach"},
        {"optimizer": "for-loop"},
        {"optimizer": "fused"},
        {"expandable_segments": True},
        {"micro_batch": 12, "accumulation": 1, "optimizer_in_backward": True},
        {"micro_batch": 12, "accumulation": 1, "optimizer_in_backward": True, "optimizer": "fused"},
    ],
    ids=str,
)
def test_it_trains_the_same_as_whole_batches(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "backend:native")  # put back afterwards
    weights = trained(plan_of(**{"micro_batch": 4, "accumulation": 3, **settings}))
    torch.testing.assert_close(weights, plainly(), **EXACT)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, momentum=0.9)),
        ("adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1)),
    ],
)
def test_another_optimizer_takes_the_learning_rate_over(name: str, make: Any) -> None:
    weights = trained(plan_of(micro_batch=4, accumulation=3, optimizer=name))
    torch.testing.assert_close(weights, plainly(make), **EXACT)


def test_clipping_sees_the_whole_gradient_once() -> None:
    def clipped(parameters: Any) -> Any:
        own = list(parameters)
        optimizer = make_optimizer(own)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(own, 0.01)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    names = module_of(plan_of(micro_batch=4, accumulation=3))
    names["CLIP_GRAD_NORM"] = 0.01
    model = names["train"](make_model, make_optimizer, loss_of, batches(*SIZES))
    torch.testing.assert_close(
        [parameter.detach() for parameter in model.parameters()], plainly(clipped), **EXACT
    )


def test_a_mean_over_tokens_is_kept_when_tokens_are_counted() -> None:
    def masked(model: Any, batch: Any) -> torch.Tensor:
        kept = torch.where(batch["y"] == 0, -100, batch["y"])
        return torch.nn.functional.cross_entropy(model(batch["x"]), kept)

    names = module_of(plan_of(micro_batch=4, accumulation=3))
    model, optimizer = names["prepare"](make_model, make_optimizer)
    plain = make_model()
    (batch,) = batches(12)
    masked(plain, batch).backward()  # type: ignore[no-untyped-call]
    before = [parameter.grad for parameter in plain.parameters()]
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad for p in model.parameters()))
    names["train_step"](model, optimizer, masked, batch, lambda part: (part["y"] != 0).sum())
    torch.testing.assert_close(seen, before, **EXACT)


@pytest.fixture
def _own_matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_own_matmul_precision")
@pytest.mark.parametrize(
    ("precision", "on_host"),
    [
        ("fp16", None),
        ("fp16", "offload_optimizer"),
        ("fp16", "zero_offload"),
        ("bf16", None),
        ("bf16", "offload_optimizer"),
        ("bf16", "zero_offload"),
        ("tf32", None),
        ("tf32", "offload_optimizer"),
    ],
)
def test_mixed_precision_trains_nearly_the_same(precision: str, on_host: str | None) -> None:
    offload = {} if on_host is None else {on_host: True}
    names = module_of(plan_of(micro_batch=4, accumulation=3, precision=precision, **offload))
    assert ("SCALER" in names) == (precision == "fp16")
    single = [{**batch, "x": batch["x"].float()} for batch in batches(*SIZES)]
    model = names["train"](lambda: make_model().float(), make_optimizer, loss_of, single)
    weights = [parameter.detach().double() for parameter in model.parameters()]
    assert all(weight.isfinite().all() for weight in weights)
    # AdamW's first steps are as long as the learning rate, whatever the gradient: a tiny gradient
    # of the other sign moves a weight the other way, so the whole is compared.
    pairs = zip(weights, plainly(), strict=True)
    apart = sum((mixed - plain).abs().mean() for mixed, plain in pairs) / len(weights)
    assert apart < 5e-3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_zero_offload_clips_and_updates_fp32_weights_on_the_host(precision: str) -> None:
    plan = plan_of(micro_batch=4, accumulation=3, precision=precision, zero_offload=True)
    names = module_of(plan)
    names["CLIP_GRAD_NORM"] = 1e-3
    single = [{**batch, "x": batch["x"].float()} for batch in batches(12)]

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=1.0)

    model, optimizer = names["prepare"](lambda: make_model().float(), sgd)
    before = [p.detach().clone() for p in optimizer.there]
    given = [p.detach().float() for p in make_model().parameters()]
    assert all(torch.equal(p, q) for p, q in zip(before, given, strict=True))  # not rounded
    names["train_step"](model, optimizer, loss_of, single[0])
    moved = [q.detach() - p for p, q in zip(before, optimizer.there, strict=True)]
    length = torch.cat([one.flatten() for one in moved]).norm()
    assert float(length) == pytest.approx(1e-3, rel=1e-3)
    assert all(
        torch.equal(p.to(q.dtype), q)
        for p, q in zip(optimizer.there, model.parameters(), strict=True)
    )


@whatever_it_takes
@given(any_plans.filter(lambda plan: not plan.variant.optimizer_in_backward))
def test_every_plan_makes_code_that_compiles_and_keeps_the_batch(plan: Planned) -> None:
    text = plan.to_code()
    compile(text, "exported.py", "exec")
    imports = [line for line in text.splitlines() if line.startswith("from oomph")]
    assert bool(imports) == (plan.variant.loss == "chunked" or plan.variant.optimizer == "muon")
    assert "import oomph" not in text
    assert f"MICRO_BATCH = {plan.micro_batch} " in text
    assert f"ACCUMULATE = {plan.accumulate} " in text
    assert f"NUM_GPUS = {plan.gpus}\n" in text


def many_settings() -> list[dict[str, Any]]:
    """Every precision with every optimizer and sharding; the other tricks come along in turn."""
    ways = ["none", "blocks", "every-3", "blocks:0,2", "selective"]
    combinations = itertools.product(get_args(Precision), OPTIMIZERS, get_args(Sharding))
    return [
        {
            "precision": precision,
            "optimizer": optimizer,
            "sharding": sharding,
            "num_gpus": 1 if sharding == "none" else 4,
            "checkpointing": ways[number % 5],
            "adapters": ["none", "lora", "qlora" if "bf16" in precision else "lora"][number % 3],
            "attention": ["as-is", "sdpa"][number % 2],
            "loss": ["as-is", "chunked"][number % 13 > 9],
            "offload_optimizer": number % 2 == 1,
            "offload_activations": number % 7 < 3,
            "expandable_segments": number % 11 < 5,
            "channels_last": number % 5 < 2,
        }
        for number, (precision, optimizer, sharding) in enumerate(combinations)
    ]


def test_no_name_is_unknown_or_unused_and_the_text_is_formatted(tmp_path: Path) -> None:
    for number, settings in enumerate(many_settings()):
        plan = plan_of(**settings)
        if contradiction_in(plan.variant, clips_gradients=False) is None:
            (tmp_path / f"exported{number}.py").write_text(plan.to_code())
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--select=E9,F,W"], ["format", "--check", "--line-length=100"]):
        done = subprocess.run(
            [*ruff, *command, "--isolated", "--no-cache", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation": 2},
        {"num_gpus": 2},
        {"precision": "fp16"},
        {"offload_optimizer": True},
    ],
    ids=str,
)
def test_a_step_in_backward_is_refused_where_gradients_are_not_whole(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match="step in backward"):
        plan_of(**{"accumulation": 1, "optimizer_in_backward": True, **settings}).to_code()


def test_a_name_cannot_leave_the_docstring() -> None:
    from dataclasses import replace

    hostile = replace(plan_of(), workload='"""\nraise SystemExit\n"""', gpu='\\"""\nboom')
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(as_code(hostile), "exported.py", "exec"), names)  # noqa: S102 # what is tested
    assert names["MICRO_BATCH"] == 4


@pytest.mark.parametrize("kind", ["Net", "nested"])
def test_it_has_the_blocks_that_oomph_finds(kind: str) -> None:
    model: torch.nn.Module = make_model()
    if kind == "nested":
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        model = torch.nn.Sequential(encoder, torch.nn.Sequential(make_model(), make_model()))
    from dataclasses import replace

    from oomph.tricks.blocks import named_blocks

    names = tuple(name for name, _ in named_blocks(model))
    plan = replace(plan_of(checkpointing="blocks"), block_names=names)
    found = module_of(plan)["blocks_of"](model)
    assert [id(block) for block in found] == [id(block) for block in find_blocks(model)]


TAIL = """
import json, sys
sys.path.insert(0, {tests!r})
from exporting.test_code import batches, loss_of, make_model, make_optimizer

rank, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def own_model():
    model = make_model()
    if rank:  # every process must end up with the weights of the first
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    return model

def part(batch, rank):
    size = len(batch["y"]) // number + (number == 2)  # the halves of an odd batch differ in size
    return {{n: v if isinstance(v, str) else v.split(size)[rank] for n, v in batch.items()}}

parts = [part(batch, rank) for batch in batches({sizes})]
model = train(own_model, make_optimizer, loss_of, parts)
weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump([w.detach().flatten().tolist() for w in weights], file)
dist.barrier()  # gloo's threads must not outlive the other process
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"sharding": "ddp", "checkpointing": "every-2", "offload_optimizer": True},
        {"sharding": "fsdp", "checkpointing": "blocks"},
        {"sharding": "fsdp", "offload_optimizer": True},
        {"sharding": "hybrid", "num_gpus": 4},  # on one machine, in two groups
    ],
    ids=str,
)
def test_several_processes_train_the_same_as_one(settings: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(**{"micro_batch": 2, "accumulation": 3, "num_gpus": 2, **settings})
    # FSDP talks in every part of a batch, so both processes need equally many.
    sizes = {"ddp": (11, 11, 10), "fsdp": (11, 11), "hybrid": (16, 8)}[settings["sharding"]]
    script = tmp_path / "train.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(plan.to_code() + TAIL.format(tests=tests, sizes=", ".join(map(str, sizes))))
    command = plan.to_torchrun(str(script), [str(tmp_path / "weights.json")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.arguments[1:]],
        env={**os.environ, **command.environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    weights = json.loads((tmp_path / "weights.json").read_text())
    expected = [weight.flatten().tolist() for weight in plainly(sizes=sizes)]
    torch.testing.assert_close(weights, expected, **EXACT)
