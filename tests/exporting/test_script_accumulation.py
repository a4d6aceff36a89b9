"""An edited loop makes the steps that it made before: the same examples, with the same shares."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.plans import whatever_it_takes

from exporting.script_stage import applied, loader_of, seen_of, split, trained

WITH_LOADER = seen_of(loader=loader_of(32))

LOOPS = {
    "as most write it": """
loader = DataLoader(range(96), batch_size=32, shuffle=True)
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
""",
    "zeroing last, with a clip, a scheduler and a counter": """
loader = DataLoader(range(96), batch_size=32, shuffle=True)
num_steps = 0
for epoch in range(2):
    for batch in tqdm(loader):
        loss = model(batch)
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        num_steps += 1
        if num_steps % 2 == 0:
            print(num_steps, norm, loss.item())
assert num_steps == 6
""",
    "a loss scaler": """
loader = DataLoader(range(96), batch_size=32, drop_last=True)
for i, batch in enumerate(loader):
    scaler.scale(model(batch)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    "an epoch that drops its last examples": """
loader = DataLoader(range(110), batch_size=32, drop_last=True)
for epoch in range(3):
    for batch in loader:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "an epoch that ends with a smaller batch": """
loader = DataLoader(range(48), batch_size=32, shuffle=True)
for epoch in range(3):
    for i, batch in enumerate(loader, 1):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"{i}/{len(loader)}")
""",
    "a loop in a function, a size from a constant": """
BATCH = 32

def loaders():
    return DataLoader(range(96), BATCH, shuffle=True), DataLoader(range(5), 5)

def train(loader, optimizer):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

training, validation = loaders()
train(training, optimizer)
train(loader=training, optimizer=optimizer)
""",
    "a config in a dict": """
config = {"lr": 0.1, "batch_size": 32}
loader = DataLoader(range(64), batch_size=config["batch_size"], shuffle=True)
for batch in loader:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()
""",
    "a config in a class": """
class Config:
    lr: float = 0.1
    batch_size: int = 32

config = Config()
loader = DataLoader(range(64), batch_size=config.batch_size, shuffle=True)
for batch in loader:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()
""",
    "a walrus, and semicolons where nothing is changed": """
size = 32; data = range(64)
loader = DataLoader(data, batch_size=size, shuffle=True)
for batch in loader:
    optimizer.zero_grad()
    print(value := model(batch)); loss = value
    loss.backward()
    optimizer.step()
""",
    "a text of several lines within the step": '''
loader = DataLoader(range(64), batch_size=32, shuffle=True)
for batch in loader:
    optimizer.zero_grad()
    model(batch).backward()
    norm = clip_grad_norm_(model, """
not indented
""")
    # the step
    optimizer.step()  # at last

    scheduler.step()
''',
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_a_loader_makes_the_same_steps(name: str) -> None:
    text = LOOPS[name]
    changes = split(text, seen=WITH_LOADER)
    assert changes.by_hand == ()
    after = applied(text, changes.diff)
    assert trained(after).steps == trained(text).steps
    assert trained(after).told == trained(text).told


_OWN = """
accumulate = 2
loader = DataLoader(range(96), batch_size=16, shuffle=True)
done = 0
for i, batch in enumerate(loader):
    (model(batch) / accumulate).backward()
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == 3:
            break
"""


def test_a_loop_that_accumulates_and_ends_by_a_count_of_steps_makes_the_same_steps() -> None:
    seen = seen_of(micro_batch=16, accumulation=2, loader=loader_of(16))
    changes = split(_OWN, seen=seen)
    assert changes.by_hand == ()
    after = applied(_OWN, changes.diff)
    assert trained(after).steps == trained(_OWN).steps
    assert len(trained(after).steps) == 3


@pytest.mark.parametrize(
    "text",
    [
        _OWN.replace("    if (i + 1)", "    if i == 5:\n        break\n    if (i + 1)"),
        _OWN.replace(
            "    if (i + 1)", "    done += 1\n    if done > 5:\n        break\n    if (i + 1)"
        ),
        _OWN.replace("for i, batch in enumerate(loader):", "for i in range(6):\n    batch = get()"),
    ],
    ids=["by the counter", "by a count of its own", "over a range"],
)
def test_a_loop_that_ends_by_a_count_of_micro_batches_is_left(text: str) -> None:
    seen = seen_of(micro_batch=16, accumulation=2, loader=loader_of(16))
    changes = split(text, seen=seen)
    assert changes.diff == ""
    assert "micro-batches" in changes.by_hand[0]


MADE = {
    "batches cut from data": """
batch_size = 32
data = iter(range(10_000))
for step in range(3):
    batch = [next(data) for _ in range(batch_size)]
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    print(step, loss.item())
""",
    "a function that gets one, in a while loop": """
batch_size = 32
data = iter(range(10_000))
def get_batch():
    return [next(data) for _ in range(batch_size)]
step = 0
while step < 3:
    batch = get_batch()
    model(batch).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    step += 1
""",
}


@pytest.mark.parametrize("name", MADE)
def test_a_loop_that_makes_its_batches_makes_the_same_steps(name: str) -> None:
    text = MADE[name]
    changes = split(text)
    assert changes.by_hand == ()
    after = applied(text, changes.diff)
    assert trained(after).steps == trained(text).steps
    assert trained(after).told == trained(text).told


OWN = {
    "a remainder": """
accumulate = 2
loader = DataLoader(range(96), batch_size=16)
for i, batch in enumerate(loader):
    loss = model(batch) / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "two numbers in the text": """
loader = DataLoader(range(96), batch_size=16)
for i, batch in enumerate(loader):
    (model(batch) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "an inner loop": """
batch_size, accumulate = 16, 2
data = iter(range(10_000))
for step in range(3):
    for micro_step in range(accumulate):
        batch = [next(data) for _ in range(batch_size)]
        loss = model(batch)
        loss = loss / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


@pytest.mark.parametrize("times", [1, 2, 4, 8])
@pytest.mark.parametrize("name", OWN)
def test_a_loop_that_accumulates_keeps_its_way_with_another_number(name: str, times: int) -> None:
    text = OWN[name]
    has_loader = "DataLoader" in text
    seen = seen_of(micro_batch=16, accumulation=2, loader=loader_of(16) if has_loader else None)
    changes = split(text, seen=seen, micro_batch=32 // times, accumulation=times)
    assert changes.by_hand == ()
    after = applied(text, changes.diff) if changes.diff else text
    assert trained(after).steps == trained(text).steps
    assert len(after.splitlines()) == len(text.splitlines())


HEAD = "loader = DataLoader(range(64), batch_size=32, shuffle=True)\n"


STEP = "    optimizer.step()\n"


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("2 calls could be", "    model(batch).backward()\n" * 2 + STEP),
        ("sums over", "    f(model(batch), reduction='sum').backward()\n" + STEP),
        ("sums over", "    loss = model(batch).sum()\n    loss.backward()\n" + STEP),
        ("each other", "    loss = f(a @ b.t())\n    loss.backward()\n" + STEP),
        ("shares its line", "    model(batch).backward(); optimizer.step()\n"),
        (
            "may skip the step",
            "    if bad:\n        continue\n    model(batch).backward()\n" + STEP,
        ),
        ("one number", f"    (model(batch) / 2).backward()\n    if i % 2 == 1:\n    {STEP}"),
        ("more than step", f"    model(batch).backward()\n    with x:\n    {STEP}"),
    ],
)
def test_what_is_not_certain_is_left_alone_and_said(reason: str, body: str) -> None:
    text = f"{HEAD}for batch in loader:\n    optimizer.zero_grad()\n{body}"
    changes = split(text, seen=WITH_LOADER)
    assert changes.diff == ""
    [sentence] = changes.by_hand
    assert reason in sentence
    assert "8 examples at a time, 4 times for each step (the batch stays 32)" in sentence


@pytest.mark.parametrize(
    "line",
    [
        "if i >= 100: break",
        "lr = rate(i)",
        "optimizer.param_groups[0]['lr'] = 0.1 * i",
        "scheduler.step(epoch + i)",
    ],
)
def test_a_counter_that_decides_something_is_not_changed_in_meaning(line: str) -> None:
    text = (
        f"{HEAD}for i, batch in enumerate(loader):\n    optimizer.zero_grad()\n"
        f"    model(batch).backward()\n    optimizer.step()\n    {line}\n"
    )
    changes = split(text, seen=WITH_LOADER)
    assert changes.diff == ""
    assert "count micro-batches" in changes.by_hand[0]


def test_a_counter_of_steps_that_counts_before_backward_is_not_certain() -> None:
    text = (
        f"{HEAD}step = 0\nfor batch in loader:\n    step += 1\n    optimizer.zero_grad()\n"
        "    model(batch).backward()\n    optimizer.step()\n"
    )
    changes = split(text, seen=WITH_LOADER)
    assert changes.diff == ""
    assert "train.py:4: `step += 1` counts batches as steps" in changes.by_hand[0]


def test_a_schedule_over_the_length_of_the_loader_keeps_its_length() -> None:
    text = (
        f"{HEAD}scheduler = OneCycleLR(optimizer, total_steps=3 * len(loader))\n"
        "for batch in loader:\n    optimizer.zero_grad()\n    model(batch).backward()\n"
        "    optimizer.step()\n    scheduler.step()\n"
    )
    after = applied(text, split(text, seen=WITH_LOADER).diff)
    assert "total_steps=3 * (-(-len(loader) // 4))" in after


def test_another_use_of_the_number_of_batches_is_not_certain() -> None:
    text = (
        f"{HEAD}total = 3 * len(loader)\nfor batch in loader:\n    optimizer.zero_grad()\n"
        "    model(batch).backward()\n    optimizer.step()\n"
    )
    changes = split(text, seen=WITH_LOADER)
    assert changes.diff == ""
    assert "train.py:2: `len(loader)` counts batches" in changes.by_hand[0]


def test_a_batch_that_depends_on_the_turn_is_not_made_again() -> None:
    text = (
        "batch_size = 32\nfor i in range(3):\n    optimizer.zero_grad()\n"
        "    model(data[i * batch_size :][:batch_size]).backward()\n    optimizer.step()\n"
    )
    changes = split(text)
    assert changes.diff == ""
    assert "the batch depends on i" in changes.by_hand[0]


def test_a_state_that_is_handed_on_is_not_handed_on_more_often() -> None:
    text = (
        "batch_size = 32\nfor step in range(9):\n    optimizer.zero_grad()\n"
        "    loss, hidden = model(get(batch_size), hidden)\n    loss.backward()\n"
        "    optimizer.step()\n"
    )
    changes = split(text)
    assert changes.diff == ""
    assert "hands hidden from one turn to the next" in changes.by_hand[0]


# ---- any layout ----------------------------------------------------------------------------------

comments = st.sampled_from(["", "  # why", "\t# ünïcode 🧮", "  #"])
between = st.sampled_from(["", "\n", "{i}# a comment\n", "# further out\n", "   \n"])


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """The same training, written as people write."""
    unit = draw(st.sampled_from(["\t", "  ", "    ", " " * 8]))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    make = draw(
        st.sampled_from(
            [
                "loader = DataLoader(range(96), 32, shuffle=True)",
                "loader = DataLoader(range(96), shuffle=True, batch_size = 32)",
                "loader = DataLoader(\n{u}range(96),\n{u}batch_size=(32),  # é\n shuffle=True,\n)",
                "loader = DataLoader(range(96), batch_size=size, shuffle=True)",
                "loader = DataLoader(\n range(96)\n , shuffle = True\n , batch_size =\\\n size)",
            ]
        )
    )
    loop = draw(
        st.sampled_from(
            [
                "for batch in loader:",
                "for  batch  in  tqdm( loader ) :",
                "for i, batch in enumerate(loader):",
                "for (i, batch) in enumerate(\n{i}loader, start=1\n{i}):",
                "for i, batch in enumerate(tqdm(loader)):",
            ]
        )
    )
    backward = draw(
        st.sampled_from(
            [
                "loss.backward()",
                "(loss).backward()",
                "loss.backward(\n{i}{u})",
                "scaler.scale(loss).backward()",
                "scaler.scale(\n{i}{u}loss  # all of it\n{i}).backward()",
                "loss . backward ( )",
            ]
        )
    )
    zero = "optimizer.zero_grad()"
    places = draw(st.sampled_from([0, 1, 3]))
    body = ["loss = model(batch)", backward, "optimizer.step()"]
    body.insert(places, zero)
    depth = draw(st.integers(0, 2))
    indent = unit * (depth + 1)
    head = ["def main():", "if True:"][:depth]
    lines = [unit * level + text for level, text in enumerate(head)]
    lines += [unit * depth + loop.format(i=indent, u=unit) + draw(comments)]
    for text in body:
        extra = draw(between).format(i=indent)
        lines += [extra.removesuffix("\n")] if extra else []
        lines += [indent + text.format(i=indent, u=unit) + draw(comments)]
    text = "\n".join(['"""Doc."""', "size = 32", make.format(u=unit), *lines])
    text += "\nmain()" if head else ""
    text += draw(st.sampled_from(["", "\n", "\n\n# the end"]))
    return text.replace("\n", newline)


@whatever_it_takes
@given(layouts())
def test_whatever_the_layout_the_steps_are_the_same(text: str) -> None:
    changes = split(text, seen=WITH_LOADER, expandable_segments=True)
    assert changes.by_hand == ()
    after = applied(text, changes.diff)
    ast.parse(after)
    assert trained(after).steps == trained(text).steps
    if "\r\n" in text:
        assert "\n" not in after.replace("\r\n", "")
    kept = [line.strip() for line in text.splitlines() if "#" in line and "loss" not in line]
    assert all(line.partition("#")[2] in after for line in kept)
