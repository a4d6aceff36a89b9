"""Plan -> a plain PyTorch training loop as text, which follows the plan exactly without oomph.

It needs torch 2.6 or newer. This file writes the loop over micro-batches, the processes and the
loss scaler; each trick's own file adds the rest through `in_code`. The chunked loss has no short
form, so the text imports oomph for it and says so. tests/exporting/test_code.py runs the text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from oomph.errors import UsageError
from oomph.exporting.settings import refuse_shared_layers
from oomph.launching.torchrun import MEETING, launch_options, split_of, spread
from oomph.records.plan import Plan
from oomph.records.workload import Variant, check_checkpointing
from oomph.tricks.trick import contradiction_in, to_put_on

if TYPE_CHECKING:
    from oomph.tricks.definition import Fragment

_STANDARD = ("contextlib", "weakref", "collections", "typing")  # of Python itself

_BATCHES = '''
def with_tensors(batch, change):
    """The batch with every tensor in it changed, in tuples, lists and mappings too."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: with_tensors(part, change) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [with_tensors(part, change) for part in batch]
    return batch


def num_examples(batch):
    """How many examples a batch has: the length of its tensors."""
    lengths = []
    with_tensors(batch, lambda tensor: lengths.append(len(tensor)))
    return lengths[0]


def on_device(tensor):
    return tensor.to(DEVICE, non_blocking=True)
'''

_BLOCKS = '''
def blocks_of(model):
    """The blocks that a model is a stack of: the list with the most parameters in it."""
    stacks = []
    for modules in model.modules():
        if isinstance(modules, (torch.nn.ModuleList, torch.nn.Sequential)) and len(modules) > 1:
            most_common = Counter(type(module) for module in modules).most_common(1)[0][0]
            stack = [m for m in modules if type(m) is most_common and list(m.children())]
            stacks += [stack] if len(stack) > 1 else []
    return max(stacks, key=lambda stack: sum(p.numel() for m in stack for p in m.parameters()))
'''

_NAMED_BLOCKS = '''
def blocks_of(model):
    """The blocks that the plan was made with."""
    return [model.get_submodule(name) for name in BLOCKS]
'''

_PREPARE = '''
def prepare(make_model, make_optimizer):
    """The model and the optimizer, with everything of the plan put on them."""
    {body}
'''

_STEP = '''
def train_step(model, optimizer, loss_of, batch, weight_of=num_examples):
    """One update from this process's part of a batch; gives the mean loss of that part.

    loss_of(model, batch) is a mean over examples. Where yours is a mean over something else, as
    tokens, weight_of(batch) has to count that.
    """
    if num_examples(batch) > MICRO_BATCH * ACCUMULATE:
        raise ValueError(f"planned for batches of {MICRO_BATCH * ACCUMULATE} in each process")
    starts = range(0, num_examples(batch), MICRO_BATCH)
    parts = [with_tensors(batch, lambda t, at=at: t[at : at + MICRO_BATCH]) for at in starts]
    weights = [float(weight_of(part)) for part in parts]
    {total}
    summed = 0.0
    for part, weight in zip(parts, weights):
        {each}
        summed = summed + loss.detach() * weight
    {update}
    return summed / sum(weights)
'''

_TRAIN = '''
def train(make_model, make_optimizer, loss_of, batches):
    """Trains on the batches, {share} examples each, and gives the model back."""
    model, optimizer = prepare(make_model, make_optimizer)
    model.train()
    for batch in batches:
        train_step(model, optimizer, loss_of, batch)
    return model
'''


def as_code(plan: Plan) -> str:
    """Return the text of a Python file with train(), prepare() and train_step()."""
    variant = plan.variant
    _check(variant)
    loop = _Loop(plan)
    functions = "\n\n\n".join(text.strip("\n") for text in loop.functions())
    head = "\n\n".join([loop.docstring(), loop.imports(), loop.constants()])
    return f"{head}\n\n\n{functions}\n"


def _check(variant: Variant) -> None:
    refuse_shared_layers(variant, "plain code")
    check_checkpointing(variant.checkpointing)  # the value becomes part of the text
    error = contradiction_in(variant, clips_gradients=False)
    if error is None and variant.optimizer_in_backward and variant.num_gpus > 1:
        error = UsageError(
            "the optimizer cannot step in backward",
            because=f"gradients are complete only after {variant.num_gpus} GPUs have averaged them",
            attempt="one GPU",
        )
    if error is not None:
        raise error


class _Loop:
    """A plan's loop, assembled from what each of its tricks adds."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.variant = plan, plan.variant
        # In the order of application: adapters first, then the dtype of everything.
        tricks = sorted(
            to_put_on(self.variant), key=lambda t: (t.put_on_built is None, t.cast is None)
        )
        self.fragments: list[Fragment] = [trick.in_code(self.variant) for trick in tricks]
        self.needs_blocks = any(fragment.needs_blocks for fragment in self.fragments)
        self.block_names = plan.block_names if self.needs_blocks else ()

    def lines(self, part: str) -> list[str]:
        """Return what the tricks add to one part of the file."""
        return [line for fragment in self.fragments for line in getattr(fragment, part)]

    def all(self, part: str) -> list[str]:
        """Return the same, but each line or function once."""
        return list(dict.fromkeys(self.lines(part)))

    def docstring(self) -> str:
        variant, plan = self.variant, self.plan
        share = variant.micro_batch * variant.accumulation
        start, where, loader = "python", "", "workers"
        if variant.num_gpus > 1:
            nodes = spread(variant)
            meeting = None
            if nodes.num_nodes > 1:
                meeting = MEETING
                where = f" on each of {nodes.num_nodes} machines, FIRST-HOST being one of them"
            start = shlex.join(["torchrun", *launch_options(nodes, meeting)])
            loader = "a DistributedSampler, which gives all processes equally many"
        sentences = [
            (
                f"Training as oomph planned it: {_harmless(plan.workload)} on {variant.num_gpus} x"
                f" {_harmless(plan.gpu)}."
            ),
            f"{split_of(variant)}.",
            (
                "Call train(...) at the end of this file and start it with"
                f" {start} THIS_FILE.py{where}."
            ),
            (
                f"Each batch is what this process trains of it, {share} examples, on the host: make"
                f" them with a DataLoader of batch_size={share}, pin_memory=True and {loader}."
            ),
            *self.all("notes"),
        ]
        return '"""' + "\n\n".join(fill(text, 98) for text in sentences) + '\n"""'

    def imports(self) -> str:
        added = self.all("imports")
        own = ["import os", "from collections.abc import Mapping"]
        if self.needs_blocks and not self.block_names:
            own.append("from collections import Counter")
        future = [line for line in added if line.split()[1] == "__future__"]
        standard = [*own, *(line for line in added if line.split()[1] in _STANDARD)]
        added = [line for line in added if line not in future]
        others = ["import torch", *(line for line in added if line not in standard)]
        head = [*future, ""] if future else []
        parts = [head, _by_module(standard), [""], self.lines("environment"), _by_module(others)]
        return "\n".join(line for lines in parts for line in lines)

    def constants(self) -> str:
        variant = self.variant
        lines = [
            f"MICRO_BATCH = {variant.micro_batch}  # examples at a time",
            f"ACCUMULATE = {variant.accumulation}  # times, before each step of the optimizer",
            f"NUM_GPUS = {variant.num_gpus}",
            "CLIP_GRAD_NORM = None  # yours, if you clip",
            'LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))',
            (
                'DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else'
                ' torch.device("cpu")'
            ),
            *self.lines("constants"),
        ]
        if self.block_names:  # as JSON, so that a module's name cannot become code
            lines += ["BLOCKS = [", *(f"    {json.dumps(n)}," for n in self.block_names), "]"]
        return "\n".join(lines)

    def functions(self) -> list[str]:
        blocks = _NAMED_BLOCKS if self.block_names else _BLOCKS
        return [
            _BATCHES,
            *([blocks] if self.needs_blocks else []),
            *self.all("functions"),
            _PREPARE.replace("{body}", "\n    ".join(self._prepared())),
            self._train_step(),
            _TRAIN.format(share=self.variant.micro_batch * self.variant.accumulation),
        ]

    def _prepared(self) -> list[str]:
        return [
            *(["start()"] if self.variant.num_gpus > 1 else []),
            "model = make_model()",
            *self.lines("on_model"),
            *(self.lines("to_gpu") or ["model.to(DEVICE)"]),
            *self.lines("on_gpu"),
            f"optimizer = {self._optimizer()}",
            "return model, optimizer",
        ]

    def _optimizer(self) -> str:
        is_planned = any(fragment.makes_optimizer for fragment in self.fragments)
        wrapper = next(filter(None, (one.optimizer_class for one in self.fragments)), "")
        if wrapper:
            inner = "lambda own: planned_optimizer(own, make_optimizer)"
            return f"{wrapper}(model.parameters(), {inner if is_planned else 'make_optimizer'})"
        if is_planned:
            return "planned_optimizer(model.parameters(), make_optimizer)"
        return "make_optimizer(model.parameters())"

    # ---- one step ----

    def _train_step(self) -> str:
        total = ["total = sum(weights)"]
        if self.variant.num_gpus > 1:
            total = [
                "counted = torch.tensor(sum(weights), dtype=torch.float64, device=DEVICE)",
                "dist.all_reduce(counted)",
                "total = counted.item() / NUM_GPUS  # gradients are averaged over the processes",
            ]
        text = _STEP.replace("{total}", "\n    ".join(total))
        text = text.replace("{each}", "\n        ".join(self._each_part()))
        return text.replace("{update}", "\n    ".join(self._update()))

    def _each_part(self) -> list[str]:
        """Return the lines for forward and backward of MICRO_BATCH examples."""
        forward = ["loss = loss_of(model, with_tensors(part, on_device))"]
        if contexts := self.lines("around_forward"):
            forward = [f"with {', '.join(contexts)}:", *_indented(forward)]
        share = "loss * (weight / total)"
        is_scaled = self.variant.precision == "fp16"
        lines = [
            *forward,
            "# Each mean counts as much as it has examples: the last one may have fewer.",
            f"SCALER.scale({share}).backward()" if is_scaled else f"({share}).backward()",
        ]
        if self.variant.sharding != "ddp":
            return lines
        return [
            "# Gradients are averaged over the processes once, with the last part.",
            "is_last = part is parts[-1]",
            "with contextlib.nullcontext() if is_last else model.no_sync():",
            *_indented(lines),
        ]

    def _update(self) -> list[str]:
        if self.variant.optimizer_in_backward:
            return ["# Every parameter has been updated: backward did it."]
        is_scaled = self.variant.precision == "fp16"
        has_masters = self.variant.zero_offload  # the gradients that count are the host's
        clipped = "optimizer.there" if has_masters else "model.parameters()"
        return [
            *(["optimizer.take()"] if has_masters else []),
            "if CLIP_GRAD_NORM is not None:",
            *(["    SCALER.unscale_(optimizer)"] if is_scaled else []),
            f"    torch.nn.utils.clip_grad_norm_({clipped}, CLIP_GRAD_NORM)",
            *(["SCALER.step(optimizer)", "SCALER.update()"] if is_scaled else ["optimizer.step()"]),
            "optimizer.zero_grad(set_to_none=True)",
        ]


def _by_module(imports: Sequence[str]) -> list[str]:
    return sorted(imports, key=lambda line: line.split()[1])


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _harmless(name: str) -> str:
    """Return a name that cannot end the docstring it stands in."""
    return "".join(c if c.isprintable() and c not in '\\"' else "?" for c in name)[:80]
