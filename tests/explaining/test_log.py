"""A log of any size, of several ranks, however hostile -> the messages in it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oom_texts import Written, written

from oomph.explaining.log import read_log
from oomph.oom_message import parse

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {gpu} has a total"
    " capacity of 24.00 GiB of which 1.00 GiB is free. Of the allocated memory 22.00 GiB is"
    " allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated. If reserved but"
    " unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to"
    " avoid fragmentation."
)
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 80, in <module>
    main()
  File "/home/me/model.py", line 33, in forward
    return self.proj(x)
  File "/env/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
"""


@given(written(), st.integers(1, 4000))
@settings(max_examples=40)
def test_a_message_is_found_wherever_the_stream_is_cut(one: Written, size: int) -> None:
    log = f"epoch 1\n{TRACEBACK}RuntimeError: {one.text}\nwandb: synced\n" * 2
    data = log.encode()
    found = read_log(data[at : at + size] for at in range(0, len(data), size))
    assert [message.num_seen for message in found.messages] == [2]
    direct = parse(one.text)
    assert direct is not None
    (message,) = found.messages
    assert message.family == one.family
    assert message.requested_bytes == direct.requested_bytes
    assert message.reserved_bytes == direct.reserved_bytes
    assert message.where == "/home/me/model.py:33 in forward"
    assert found.script == "/home/me/train.py"


@pytest.mark.parametrize("form", ["[rank{0}]: ", "[default{0}]:", "{0}: ", "[1,{0}]<stderr>:"])
def test_ranks_that_are_mixed_line_by_line_are_told_apart(form: str) -> None:
    lines = []
    texts = [(TRACEBACK + OOM.format(gpu=rank)).splitlines() for rank in range(3)]
    for group in zip(*texts, strict=True):
        lines += [form.format(rank) + line for rank, line in enumerate(group)]
    found = read_log([("\n".join(lines) + "\n").encode()])
    assert [(message.rank, message.device) for message in found.messages] == [
        ("0", 0),
        ("1", 1),
        ("2", 2),
    ]
    assert {message.where for message in found.messages} == {"/home/me/model.py:33 in forward"}


def test_a_message_in_a_box_of_rich_is_one_message() -> None:
    text = OOM.format(gpu=5)
    boxed = "\n".join(f"│ {text[at : at + 60]:<60} │" for at in range(0, len(text), 60))
    (message,) = read_log([f"╭──── Traceback ────╮\n{boxed}\n╰────╯\n".encode()]).messages
    whole = parse(text)
    assert whole is not None
    assert (message.device, message.reserved_bytes) == (5, whole.reserved_bytes)


def test_two_different_messages_are_two() -> None:
    second = OOM.format(gpu=0).replace("2.00 GiB", "3.00 GiB")
    found = read_log([f"{OOM.format(gpu=0)}\n{second}\n".encode()])
    assert [message.requested_bytes for message in found.messages] == [2 << 30, 3 << 30]


def test_the_settings_of_the_run_are_found_but_not_those_that_torch_proposes() -> None:
    assert read_log([OOM.format(gpu=0).encode()]).settings is None
    log = f"+ export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{OOM.format(gpu=0)}\n"
    assert read_log([log.encode()]).settings == "expandable_segments:True"


def test_a_log_without_one_has_its_lines_counted() -> None:
    found = read_log([b"step 1\nstep 2\n", b"step 3"])
    assert (found.messages, found.num_lines) == ((), 3)


def hostile() -> Iterator[bytes]:
    yield b"THCudaCheck FAIL" * 6000  # no end of line
    yield b"\x00\xff\x1b[31m" * 12_000
    yield b"CUDA out of memory. " * 5000
    yield b"\r\n\r\n" * 2000
    yield b"[rank7]: " + b"(" * 100_000
    yield b"\n" + OOM.format(gpu=1).encode() + b"\n"


def test_hostile_lines_take_little_memory_and_hide_nothing() -> None:
    tracemalloc.start()
    found = read_log(hostile())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any(message.device == 1 for message in found.messages)
    assert peak_bytes < 64 << 20


def test_of_many_messages_the_first_and_the_last_are_kept() -> None:
    def log() -> Iterator[bytes]:
        for number in range(300):
            yield OOM.format(gpu=number).encode() + b"\n\n"

    found = read_log(log())
    assert len(found.messages) == 64
    assert (found.messages[0].device, found.messages[-1].device) == (0, 299)


@given(st.lists(st.binary(max_size=300), max_size=10))
def test_any_bytes_are_a_log(chunks: list[bytes]) -> None:
    assert read_log(chunks).num_lines >= 0
