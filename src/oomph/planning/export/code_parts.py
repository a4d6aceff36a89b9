"""The parts that a plain PyTorch training loop is put together from, as text.

The text stands alone: it imports torch, and oomph nowhere. tests/planning/test_code.py runs it.
"""

from __future__ import annotations

BATCHES = '''
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

KEPT_ON_HOST = '''
def kept_on_host():
    """What backward needs waits in the host's memory."""
    return torch.autograd.graph.save_on_cpu(pin_memory=DEVICE.type == "cuda")
'''

START = '''
def start():
    """Joins the processes that torchrun started, of which each has one GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    if dist.get_world_size() != NUM_GPUS:
        raise SystemExit(f"planned for {NUM_GPUS} processes: torchrun --nproc-per-node {NUM_GPUS}")
'''

BLOCKS = '''
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

NAMED_BLOCKS = '''
def blocks_of(model):
    """The blocks that the plan was made with."""
    return [model.get_submodule(name) for name in BLOCKS]
'''

CHECKPOINT = '''
def recompute(block):
    """Keeps nothing of the block's forward: backward runs it again. Names stay as they are."""
    forward = block.forward

    def recomputed(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint({arguments})

    block.forward = recomputed
'''

SELECTIVE = '''
def keep_what_is_dear(_context, op, *_args, **_kwargs):
    """Matrix products, convolutions and attention are kept; the rest is cheap to run again."""
    dear = ("mm", "addmm", "bmm", "baddbmm", "convolution")
    name = op.name().removeprefix("aten::").split(".")[0]
    is_dear = name in dear or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE
'''

SAME_START = '''
def start_alike(model):
    """Gives every process the weights of the first: sharding does not do that by itself."""
    for tensor in [*model.parameters(), *model.buffers()]:
        sent = tensor.detach().to(DEVICE)
        dist.broadcast(sent, 0)
        tensor.data.copy_(sent)
'''

ON_HOST = '''
class OnHost:
    """The user's optimizer, with its state and its step on the host."""

    def __init__(self, parameters, make_optimizer):
        self.here = [p for p in parameters if p.requires_grad]
        self.there = [p.detach().to("cpu", copy=True).requires_grad_() for p in self.here]
        self.optimizer = make_optimizer(self.there)  # learning rates are changed here
        self.param_groups = [{"params": self.here}]  # what a GradScaler looks at

    def step(self):
        for here, there in zip(self.here, self.there):
            there.grad = None if here.grad is None else here.grad.to("cpu")
        self.optimizer.step()
        with torch.no_grad():
            for here, there in zip(self.here, self.there):
                here.copy_(there)

    def zero_grad(self, set_to_none=True):
        for here in self.here:
            here.grad = None
'''

IN_BACKWARD = '''
class InBackward:
    """One optimizer for each parameter, which steps as soon as backward has its gradient."""

    def __init__(self, parameters, make_optimizer):
        trained = [p for p in parameters if p.requires_grad]
        self.optimizers = {p: make_optimizer([p]) for p in trained}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.step_one)

    def step_one(self, parameter):
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad(set_to_none=True)
'''

ANOTHER = '''
def planned_optimizer(parameters, make_optimizer):
    """{what}: your groups, learning rates and weight decays are taken over."""
    own = make_optimizer(parameters)
    names = {names}
    groups = [
        {{"params": group["params"], **{{n: group[n] for n in names if n in group}}}}
        for group in own.param_groups
    ]
    return {made}
'''

IMPLEMENTATION = '''
def planned_optimizer(parameters, make_optimizer):
    """Your optimizer, in its {what} implementation."""
    optimizer = make_optimizer(parameters)
    for settings in [optimizer.defaults, *optimizer.param_groups]:
        settings.update({flags})
    return optimizer
'''

STEP = '''
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

PREPARE = '''
def prepare(make_model, make_optimizer):
    """The model and the optimizer, with everything of the plan put on them."""
    {body}
'''

TRAIN = '''
def train(make_model, make_optimizer, loss_of, batches):
    """Trains on the batches, {share} examples each, and gives the model back."""
    model, optimizer = prepare(make_model, make_optimizer)
    model.train()
    for batch in batches:
        train_step(model, optimizer, loss_of, batch)
    return model
'''
