"""The emulated GPU: real numbers, real accounting, real shortages, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oomph
from oomph.errors import UsageError
from oomph.units import MIB

SIZE = 256


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(SIZE, SIZE), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 10)
    )


def trained(device: str, batch: int = 16, steps: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = perceptron().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x, y = torch.randn(batch, SIZE).to(device), torch.randint(0, 10, (batch,), device=device)
        loss: Any = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


# ---- numbers ---------------------------------------------------------------------------------


def test_the_weights_are_bit_for_bit_those_of_the_cpu() -> None:
    plain = trained("cpu")
    with oomph.emulated_gpu("1GiB"):
        emulated = trained("cuda")
    assert all(torch.equal(plain[name], emulated[name]) for name in plain)


def test_a_shortage_changes_no_weight_no_statistic_and_no_random_number() -> None:
    with oomph.emulated_gpu("40MiB"):
        model = perceptron().cuda()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        x = torch.randn(12_000, SIZE, device="cuda")
        torch.cuda.empty_cache()
        batch_norm, dropout = model[3], model[2]
        held = torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")
        random = torch.get_rng_state()
        for module in (batch_norm, dropout):
            with pytest.raises(torch.OutOfMemoryError):
                module(x)
        assert torch.equal(torch.get_rng_state(), random)
        after = model.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"3.num_batches_tracked"}  # by Python, before the op
        del held


# ---- where tensors are -----------------------------------------------------------------------


def test_tensors_say_where_they_are() -> None:
    with oomph.emulated_gpu("1GiB"):
        x = torch.zeros(3, device="cuda")
        on_gpu = [x, x[1:], x + 1, x.new_ones(2), torch.ones_like(x), torch.tensor([1], device=0)]
        on_gpu += [torch.zeros(2).to(x), torch.zeros(2).to("cuda:0", torch.float16), x.half()]
        on_host = [x.cpu(), torch.zeros(2), torch.zeros_like(x, device="cpu"), x.to("cpu")]
        assert {tensor.device.type for tensor in on_gpu} == {"cuda"}
        assert all(tensor.is_cuda and not tensor.is_cpu for tensor in on_gpu)
        assert {tensor.device.type for tensor in on_host} == {"cpu"}
        assert x.to("cuda") is x
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
            x.numpy()


def test_empty_tensors_say_where_they_are_and_take_nothing() -> None:
    with oomph.emulated_gpu("1GiB") as gpu:
        x = torch.ones(3, device="cuda")
        before = gpu.allocated_bytes
        made = [torch.empty(0, device="cuda"), torch.zeros(0, 4, device="cuda"), x.new_zeros(0)]
        made += [x[x > 5], torch.nonzero(x > 5), made[0] * 2, torch.tensor([], device="cuda")]
        made += [torch.zeros(0).cuda(), torch.cat([made[0], made[0]])]
        assert {tensor.device.type for tensor in made} == {"cuda"}
        assert made[0].cpu().device.type == torch.zeros(0).device.type == "cpu"
        assert gpu.allocated_bytes == before
        grown = torch.empty(0, device="cuda")
        torch.cat([x, x], out=grown)
        assert gpu.allocated_bytes == before + 512
        del grown, made
        assert gpu.allocated_bytes == before


def test_the_default_device_can_be_the_gpu() -> None:
    with oomph.emulated_gpu("1GiB"), torch.device("cuda"):
        assert nn.Linear(2, 2).weight.is_cuda
        assert torch.tensor(1.0).is_cuda


def test_the_host_is_not_counted() -> None:
    with oomph.emulated_gpu("1GiB"):
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        labels = nn.functional.one_hot(torch.arange(5000) % 10)
        assert torch.cuda.max_memory_allocated() == 0
        assert nn.functional.one_hot(labels[:, 0].cuda(), 10).is_cuda


def test_pinned_memory_is_the_hosts() -> None:
    with oomph.emulated_gpu("64MiB") as gpu:
        made = [
            torch.empty(MIB, pin_memory=True),
            torch.zeros(MIB, device="cpu", pin_memory=True),
            torch.ones(MIB).pin_memory(),
        ]
        assert {tensor.device.type for tensor in made} == {"cpu"}
        assert gpu.allocated_bytes == 0
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.empty(MIB, device="cuda", pin_memory=True)


def test_offloaded_activations_are_on_the_host_and_give_the_same_gradients() -> None:
    from oomph.tricks.offload_activations import offloaded_activations

    def gradients(*, is_offloaded: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        with oomph.emulated_gpu("1GiB") as gpu:
            layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
            model = nn.Sequential(*layers).cuda()
            x = torch.randn(2048, 64, device="cuda")
            with offloaded_activations() if is_offloaded else contextlib.nullcontext():
                loss = model(x).square().mean()
            loss.backward()
            grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            return grads, gpu.peak_allocated_bytes

    kept, kept_bytes = gradients(is_offloaded=False)
    offloaded, offloaded_bytes = gradients(is_offloaded=True)
    assert all(torch.equal(one, other) for one, other in zip(kept, offloaded, strict=True))
    # 12 outputs of tanh; the newest five stay, and one is on its way.
    assert kept_bytes - offloaded_bytes >= 4 * 2048 * 64 * 4


def test_there_is_no_second_gpu() -> None:
    with oomph.emulated_gpu("1GiB"), pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="cuda:1")


def test_threads_share_the_card() -> None:
    with oomph.emulated_gpu("1GiB") as gpu:
        kept: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: kept.append(torch.ones(MIB, device="cuda") * 2))
        thread.start()
        thread.join()
        assert kept[0].is_cuda
        assert gpu.allocated_bytes == 4 * MIB


def test_workers_of_a_loader_make_batches_on_the_host() -> None:
    with oomph.emulated_gpu("1GiB"):
        data = TensorDataset(torch.randn(32, 4))
        loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=True)
        assert [batch.device.type for (batch,) in loader] == ["cpu"] * 4
        assert torch.cuda.max_memory_allocated() == 0


# ---- figures ---------------------------------------------------------------------------------


def test_torch_answers_with_the_figures_of_the_allocator() -> None:
    with oomph.emulated_gpu("100MiB") as gpu:
        x = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 3 * MIB == gpu.allocated_bytes
        assert torch.cuda.memory_reserved() == 20 * MIB  # the segment of a request below 10 MiB
        assert torch.cuda.mem_get_info() == (80 * MIB, 100 * MIB)
        del x
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 3 * MIB
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
        assert torch.cuda.max_memory_reserved() == 20 * MIB
        assert "Allocated memory" in torch.cuda.memory_summary()


def test_a_view_holds_the_memory_of_all() -> None:
    with oomph.emulated_gpu("100MiB"):
        x = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")[:5]
        assert torch.cuda.memory_allocated() == 3 * MIB
        assert x.is_cuda


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_come_from_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "expandable_segments:True")
    with oomph.emulated_gpu("100MiB"):
        _held = [torch.zeros(21 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        assert torch.cuda.memory_reserved() == 100 * MIB  # pages of 20 MiB, one after another


# ---- shortages -------------------------------------------------------------------------------


def test_the_request_that_does_not_fit_raises_and_nothing_is_taken() -> None:
    with oomph.emulated_gpu("100MiB") as gpu:
        held = [torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 30\.00 MiB"):
            torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 90 * MIB
        del held
        torch.zeros(99 * MIB, dtype=torch.uint8, device="cuda")  # the cache is given back first
        assert gpu.num_out_of_memory == 1
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 2


def test_what_no_machine_has_room_for_is_refused_before_it_is_made() -> None:
    with oomph.emulated_gpu("100MiB"):
        column = torch.ones(2**22, 1, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"65536\.00 GiB"):
            column + column.T


# A message of torch 2.9 or later, word for word from a user's public log of a 16 GB card.
REAL_MESSAGE = (
    "CUDA out of memory. Tried to allocate 4.72 GiB. GPU 0 has a total capacity of 14.56 GiB of "
    "which 1.94 GiB is free. Including non-PyTorch memory, this process has 12.62 GiB memory in "
    "use. Of the allocated memory 12.44 GiB is allocated by PyTorch, and 56.76 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
    "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


def without_figures(message: str) -> str:
    return re.sub(r"[\d.]+ (GiB|MiB|KiB|bytes)", "SIZE", message)


def test_the_message_is_torchs_own() -> None:
    with oomph.emulated_gpu("100MiB"):
        held = torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
        small = torch.zeros(5, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.zeros(75 * MIB - 1, dtype=torch.uint8, device="cuda")
        del held, small
    said = str(raised.value)
    assert without_figures(said) == without_figures(REAL_MESSAGE)
    assert re.findall(r"[\d.]+ (?:GiB|MiB|KiB|bytes)", said) == [
        "76.00 MiB",  # a multiple of 2 MiB
        "100.00 MiB",
        "68.00 MiB",
        "32.00 MiB",
        "30.00 MiB",
        "2.00 MiB",
    ]


def test_a_caught_shortage_holds_none_of_the_tensors_of_its_op() -> None:
    with oomph.emulated_gpu("100MiB") as gpu:
        caught = None
        try:
            torch.ones(30 * MIB, dtype=torch.uint8, device="cuda").double()
        except torch.OutOfMemoryError as error:
            caught = error
        assert caught is not None
        assert gpu.allocated_bytes == 0


def training_step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(256, 32, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_training_goes_on_after_two_hundred_shortages_and_they_leave_nothing() -> None:
    with oomph.emulated_gpu("60MiB") as gpu:
        model = nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Linear(2048, 32)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        training_step(model, optimizer)
        gc.collect()
        allocated, num_live = gpu.allocated_bytes, len(gpu._card.live)
        reserved = set()
        for number in range(200):
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info()
            ballast = torch.empty(free_bytes, dtype=torch.uint8, device="cuda")
            # The segments of cuBLAS's two workspaces have a rest of 11.9 MiB each; a step wants 8.
            sizes = (11 * MIB, (7 + number % 3) * MIB)
            more = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
            with pytest.raises(torch.OutOfMemoryError):  # in forward or in backward
                training_step(model, optimizer)
            del ballast, more
            optimizer.zero_grad()
            training_step(model, optimizer)
            torch.cuda.empty_cache()
            reserved.add(gpu.reserved_bytes)
        gc.collect()
        assert gpu.num_out_of_memory == 200
        assert gpu.allocated_bytes == allocated
        assert len(gpu._card.live) == num_live
        assert len(reserved) == 1


@pytest.mark.parametrize("budget_mib", [24, 26, 28, 30, 34, 40, 48])
def test_a_shortage_may_come_anywhere_and_the_next_try_is_exact(budget_mib: int) -> None:
    plain = trained("cpu", batch=64)
    with oomph.emulated_gpu(budget_mib * MIB):
        try:
            trained("cuda", batch=8_000)
        except torch.OutOfMemoryError:
            pass
        else:
            assert budget_mib >= 40
        emulated = trained("cuda", batch=64)
    assert all(torch.equal(plain[name], emulated[name]) for name in plain)


# ---- mixed precision -------------------------------------------------------------------------


def test_autocast_casts_what_cuda_casts() -> None:
    with oomph.emulated_gpu("1GiB"), torch.autocast("cuda", dtype=torch.float16):
        x = torch.randn(4, 8, device="cuda")
        product = x @ x.T
        assert product.dtype == torch.float16
        assert product.softmax(-1).dtype == torch.float32  # the CPU's list has it in half
        assert nn.functional.conv1d(x, torch.randn(2, 4, 3, device="cuda")).dtype == torch.float16
        assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == torch.float32  # on the host
    before = torch._C._dispatch_dump("aten::mm")
    with oomph.emulated_gpu("1GiB"):
        assert torch._C._dispatch_dump("aten::mm") != before
    assert torch._C._dispatch_dump("aten::mm") == before


def test_a_loss_scaler_works_and_weights_are_cast_once() -> None:
    with oomph.emulated_gpu("1GiB"):
        model = perceptron().cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(8, SIZE, device="cuda")).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 65536
        assert not any(map(torch.equal, before, model.parameters()))


# ---- the context -----------------------------------------------------------------------------


def snapshot() -> dict[str, dict[str, Any]]:
    import torch._dynamo  # which puts names into torch when it is first imported

    owners = {
        "torch": torch,
        "torch.cuda": torch.cuda,
        "torch.cuda.memory": torch.cuda.memory,
        "torch.cuda.random": torch.cuda.random,
        "torch.accelerator": torch.accelerator,
        "torch._C": torch._C,
        "Tensor": torch.Tensor,
        "UntypedStorage": torch.UntypedStorage,
        "Optimizer": torch.optim.Optimizer,
        "Thread": threading.Thread,
    }
    return {name: dict(vars(owner)) for name, owner in owners.items()}


def fail_with_a_tensor_on_the_gpu(made: list[torch.Tensor]) -> None:
    made.append(torch.zeros(3, device="cuda"))
    raise ZeroDivisionError


def test_everything_is_undone_even_after_an_error() -> None:
    before = snapshot()
    made: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), oomph.emulated_gpu("100MiB"):
        fail_with_a_tensor_on_the_gpu(made)
    after = snapshot()
    for owner, names in before.items():
        changed = {n for n in names | after[owner] if names.get(n) is not after[owner].get(n)}
        assert changed <= {"__slotnames__"}, owner  # a cache of copyreg
    assert made[0].device.type == "cpu"
    assert not torch.cuda.is_available()
    assert made[0].numpy().tolist() == [0, 0, 0]


def test_one_at_a_time() -> None:
    with oomph.emulated_gpu("100MiB"), pytest.raises(UsageError, match="already"):
        oomph.emulated_gpu("100MiB").__enter__()
    with oomph.emulated_gpu("100MiB"):
        pass


@pytest.mark.parametrize("size", ["nonsense", "-1GiB", "1MiB", "0", 5])
def test_a_size_that_makes_no_sense_is_refused(size: Any) -> None:
    with pytest.raises(UsageError):
        oomph.emulated_gpu(size)


def test_dropout_keeps_a_byte_for_each_element_and_drops_what_the_cpu_drops() -> None:
    torch.manual_seed(0)
    on_host = torch.nn.functional.dropout(torch.ones(1024, 1024), 0.5)
    torch.manual_seed(0)
    with oomph.emulated_gpu("64MiB") as gpu:
        ones = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        before = gpu.allocated_bytes
        dropped = torch.nn.functional.dropout(ones, 0.5)
        assert gpu.allocated_bytes - before == 4 * MIB + MIB
        assert torch.equal(dropped.detach().cpu(), on_host)
        in_evaluation = torch.nn.functional.dropout(ones, 0.5, training=False)
        assert in_evaluation.data_ptr() == ones.data_ptr()


# ---- attention -----------------------------------------------------------------------------------


def attended(device: str, dtype: Any, dropout_p: float, how: str) -> list[torch.Tensor]:
    """The output, the gradients, and the next random numbers."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 48, 16).to(dtype) for _ in range(3)]
    q, k, v = (tensor.to(device).requires_grad_() for tensor in inputs)
    mask = torch.ones(48, 48, dtype=torch.bool).tril().to(device) if how == "mask" else None
    out: Any = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=how == "causal"
    )
    out.float().square().sum().backward()
    found = [out.detach(), q.grad, k.grad, v.grad, torch.rand(3)]
    return [tensor.cpu().clone() for tensor in found if tensor is not None]


@pytest.mark.parametrize("how", ["all", "mask", "causal"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_has_the_numbers_of_the_cpu(dtype: Any, dropout_p: float, how: str) -> None:
    plain = attended("cpu", dtype, dropout_p, how)
    with oomph.emulated_gpu("64MiB"):
        emulated = attended("cuda", dtype, dropout_p, how)
    assert len(plain) == 5
    assert all(map(torch.equal, plain, emulated))


def test_a_mask_that_is_trained_has_its_gradient() -> None:
    def gradient(device: str) -> Any:
        torch.manual_seed(0)
        q, bias = torch.randn(2, 4, 8, 16).to(device), torch.zeros(8, 8).to(device)
        bias.requires_grad_()
        out: Any = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        out.sum().backward()
        assert bias.grad is not None
        return bias.grad.cpu()

    plain = gradient("cpu")
    with oomph.emulated_gpu("64MiB"):
        assert torch.allclose(gradient("cuda"), plain, atol=1e-6)


def test_attention_with_dropout_keeps_no_matrix_of_length_by_length() -> None:
    length, matrix_bytes = 1024, 4 * 1024 * 1024
    with oomph.emulated_gpu("256MiB") as gpu:
        q = torch.randn(1, 4, length, 16, device="cuda", requires_grad=True)
        out: Any = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        out.sum().backward()
        assert gpu.peak_allocated_bytes < matrix_bytes
    with pytest.raises(NotImplementedError):  # the kernels are gone with the card
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, False)
