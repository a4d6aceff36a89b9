"""Memory snapshots are read in every form and era, and a hostile or broken one does no harm."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from oomph.errors import Unreadable
from oomph.predicting.recorded import recorded_settings
from oomph.predicting.reproduction import reproduce
from oomph.records.snapshot import Snapshot
from oomph.snapshots.loading import is_snapshot, load
from snapshots.written import ERAS, Era, Writer, training, write


@pytest.mark.parametrize("form", ["pickle", "gzip", "json"])
@pytest.mark.parametrize("era", ERAS)
def test_every_era_is_read_in_every_form(tmp_path: Path, era: Era, form: str) -> None:
    writer = training(steps=2)
    path = write(tmp_path / "snapshot", writer.snapshot(era), form)
    assert is_snapshot(path.read_bytes()[:4096])
    (device,) = load(path).devices
    assert len(device.segments) == len(writer.segments())
    num_events = {"list": 0, "2.0": 1}.get(era, len(writer.trace))
    assert device.num_events == num_events
    live = [b for s in device.segments for b in s["blocks"] if b["state"] != "inactive"]
    assert sum(block["requested_size"] for block in live) == writer.requested_bytes
    assert all(block["frames"] for block in live)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_protocols_of_all_pythons_are_read(tmp_path: Path, protocol: int) -> None:
    content = training(steps=1).snapshot()
    assert load(write(tmp_path / "one", content, protocol=protocol)).devices[0].num_events


def test_a_snapshot_that_was_read_replays_exactly(tmp_path: Path) -> None:
    snapshot = load(write(tmp_path / "one", training(steps=3).snapshot()))
    (device,) = snapshot.devices
    settings = recorded_settings(snapshot.settings, device.segments)
    found = reproduce(device.segments, device.events(), settings)
    assert found.problem is None
    assert found.num_exact_allocs == found.num_allocs > 100


def test_stacks_are_kept_once(tmp_path: Path) -> None:
    snapshot = load(write(tmp_path / "one", training(steps=4).snapshot()))
    assert len(snapshot.stacks) < 20
    assert any(frame.name == "relu" for frame in snapshot.frames)


def test_an_action_of_a_later_torch_is_kept_and_ignored(tmp_path: Path) -> None:
    content = training(steps=1).snapshot()
    content["device_traces"][0].append({"action": "annotate", "what": "new"})
    (device,) = load(write(tmp_path / "one", content)).devices
    assert device.events()[-1]["action"] == "other"


# ---- hostile files -------------------------------------------------------------------------------


def attacks(mark: str) -> dict[str, bytes]:
    """Pickles that would make a careless reader run a command or take gigabytes."""
    command = f"touch {mark}"
    quoted = repr(command).encode()
    system = b"cposix\nsystem\n(S" + quoted + b"\ntR."
    text = command.encode()
    short = b"\x8c" + bytes([len(text)]) + text
    return {
        "global": system,
        "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + short + b"\x85R.",
        "inst": b"(S" + quoted + b"\niposix\nsystem\n.",
        "obj": b"(cposix\nsystem\nS" + quoted + b"\no.",
        "newobj": b"\x80\x02cposix\nsystem\nS" + quoted + b"\n\x85\x81.",
        "newobj ex": b"\x80\x04cposix\nsystem\n)}\x92.",
        "persistent": b"Pid\n.",
        "persistent binary": b"K\x01Q.",
        "extension": b"\x80\x02\x82\x01.",
        "build": b"cbuiltins\nobject\n)\x81}b.",
        "huge put": b"\x80\x04]r" + struct.pack("<I", 1 << 28) + b".",
        "huge bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b".",
        "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 34) + b".",
        "huge long": b"\x80\x02\x8b" + struct.pack("<I", (1 << 31) - 1) + b".",
        "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b".",
        "nested": b"]" * 1_000_000 + b"a" * 999_999 + b".",
        "itself": b"\x80\x04}\x94\x8c\x08segments]\x94h\x01as.",
        "buffer": b"\x80\x05\x97.",
        "nothing": b"",
        "only a stop": b".",
        "gzip bomb": gzip.compress(b"\x80\x04" + b"N0" * 40_000_000),
        "deep json": b'{"segments": ' + b"[" * 500_000 + b"}",
    }


NAMES = list(attacks(""))


def laughs() -> bytes:
    """A billion laughs: every list holds the one before many times."""
    blocks: list[Any] = [{"size": 512, "state": "inactive"}] * 5000
    segment = {"address": 1 << 21, "total_size": 512 * 5000, "blocks": blocks}
    return pickle.dumps({"segments": [segment] * 5000, "device_traces": []})


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_is_one_line_and_nothing_runs(tmp_path: Path, name: str) -> None:
    mark, before = tmp_path / "was-run", children()
    path = tmp_path / "hostile.pickle"
    path.write_bytes(attacks(str(mark))[name])
    with pytest.raises(Unreadable, match="is not a memory snapshot") as caught:
        load(path)
    assert caught.value.because
    assert "\n" not in caught.value.because
    assert not mark.exists()
    assert children() == before


def test_a_billion_laughs_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "laughs.pickle"
    path.write_bytes(laughs())
    with pytest.raises(Unreadable) as caught:
        load(path)
    assert caught.value.because == "it refers to the same items again and again"


def test_the_environment_of_the_user_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "one", training(steps=1).snapshot())
    assert load(path).devices


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"segments": None}, "no list of segments"),
        ({"segments": [1]}, "a segment is not a dict"),
        ({"device_traces": 7}, "device_traces is not a list"),
        ({"device_traces": [[7]]}, "broken"),
        ({"device_traces": [[{"action": "alloc", "addr": -1, "size": 4}]]}, "out of range"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": 1 << 60}]]}, "out of range"),
        ({"device_traces": [[{"action": "alloc", "addr": 1.5, "size": 4}]]}, "broken"),
    ],
)
def test_a_wrong_schema_is_named(tmp_path: Path, change: dict[str, Any], because: str) -> None:
    path = write(tmp_path / "one", {**training(steps=1).snapshot(), **change})
    with pytest.raises(Unreadable) as caught:
        load(path)
    assert because in (caught.value.because or "")


def _mutated(data: bytes, choose: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 8))):
        at = choose.randrange(len(changed))
        kind = choose.randrange(4)
        if kind == 0:
            changed[at] = choose.randrange(256)
        elif kind == 1:
            changed[at] ^= 1 << choose.randrange(8)
        elif kind == 2:
            del changed[at : at + choose.choice((1, 2, 50))]
        else:
            changed[at:at] = choose.randbytes(choose.choice((1, 4)))
    return bytes(changed)


def _small() -> bytes:
    writer = Writer()
    addresses = [writer.ask(1000, "forward"), writer.ask(3 << 20, "relu")]
    writer.drop(addresses[0])
    return pickle.dumps(writer.snapshot(), 4)


def _survives(path: Path, data: bytes) -> Snapshot | None:
    path.write_bytes(data)
    try:
        return load(path)
    except Unreadable:
        return None


def test_changed_bytes_are_refused_or_read_and_never_crash(tmp_path: Path) -> None:
    from oomph.explaining.snapshot import explain_snapshot

    choose, before, data = random.Random(21), children(), _small()  # noqa: S311
    num_read = 0
    for _ in range(60):
        snapshot = _survives(tmp_path / "one", _mutated(data, choose))
        if snapshot is not None:
            num_read += 1
            assert explain_snapshot(snapshot, source="mutated").sentence
    assert 0 < num_read < 60
    assert children() == before


# Reads many files in one child with the limits of a real one; starting one for each takes hours.
_MANY = """
import io, resource, struct, sys
from oomph.snapshots import unpickling
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for _ in range(int(sys.argv[1])):
    (size,) = struct.unpack("<Q", sys.stdin.buffer.read(8))
    answer = unpickling.answer(io.BytesIO(sys.stdin.buffer.read(size)), size, 3 << 30)
    whole = b"".join(unpickling.written(*answer))
    sys.stdout.buffer.write(struct.pack("<Q", len(whole)) + whole)
"""


@pytest.mark.slow
def test_50_000_changed_files_do_no_harm() -> None:
    from oomph.explaining.snapshot import explain_snapshot
    from oomph.snapshots.loading import taken_apart

    choose, data = random.Random(22), _small()  # noqa: S311
    num_read = 0
    for _ in range(50):
        files = [_mutated(data, choose) for _ in range(1000)]
        asked = b"".join(struct.pack("<Q", len(file)) + file for file in files)
        command = [sys.executable, "-c", _MANY, str(len(files))]
        done = subprocess.run(command, input=asked, capture_output=True, check=True)
        answers = io.BytesIO(done.stdout)
        while start := answers.read(8):
            snapshot = taken_apart(answers.read(struct.unpack("<Q", start)[0]))
            if not isinstance(snapshot, str):
                num_read += 1
                assert explain_snapshot(snapshot, source="mutated").sentence
    assert 1000 < num_read < 50_000


# ---- real ones -----------------------------------------------------------------------------------

DATA = Path(os.environ.get("OOMPH_RECORDINGS", "../shared/data/recordings")).parent / "snapshots"
REAL = sorted(path.name for path in DATA.glob("*.pickle"))


@pytest.mark.parametrize("name", REAL)
def test_real_snapshots_are_read_and_replay_exactly(name: str) -> None:
    snapshot = load(DATA / name)
    for device in snapshot.devices:
        if device.num_events > 1 and "synthetic" not in name:
            settings = recorded_settings(snapshot.settings, device.segments)
            found = reproduce(device.segments, device.events(), settings)
            assert found.problem is None
