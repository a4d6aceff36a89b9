"""A log of any size, as a stream of bytes -> the out-of-memory messages in it.

Memory stays bounded whatever the log holds: it is read in pieces, a line without an end is cut, and
of many messages only the first and the last are kept. Lines of several ranks that are mixed in one
log are told apart by their prefixes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from oomph.oom_message import OomMessage, is_about_memory, opens, parse, squeeze

# Every message has one of these, without blanks and in small letters.
_SIGNS = tuple(
    sign.encode()
    for sign in [
        "outofmemory",
        "out_of_memory",
        "out_of_device_memory",
        "out_of_resources",
        "outofdevicememory",
        "triedtoallocate",
        "reservedintotal",
        "reservedbypytorch",
        "avoidfragmentation",
        "alloc_failed",
        "allocation_failed",
        "statusallocfailed",
        "validcudnnalgorithm",
        "status_memory_error",
        "errormemoryallocation",
        "iskilledbysignal",
        "unexpectedbuserror",
        "sharedmemory",
        "writetofile",
        "invalidbuffersize",
        "exceedallowedmemory",
        "notallocatememory",
        "defaultcpuallocator",
        "posix_memalign",
        "unabletommap",
        "cannotallocatememory",
        "unabletoallocate",
        "killprocess",
        "killedprocess",
        "oom-kill",
        "oom_kill",
        "oomkill",
        "内存",
        "显存",
        "記憶體",
        "メモリ",
        "메모리",
        "памят",
        "memoria",
        "mémoire",
        "speicher",
        "alloc_conf",
    ]
)
_BLANK = b" \t\n\x0b\x0c"
_LONGEST_LINE = 1 << 16
_OVERLAP = 1 << 12  # of the pieces of a line that is longer
_NUM_BEFORE = 400  # lines that are kept to find the place in the program: a long traceback
_NUM_AFTER = 12  # lines over which one message may be spread
_NUM_KEPT = 64  # messages: the first half, and the last
_NUM_PLACED = 1000  # messages whose place in the program is looked up
_WINDOW = (2000, 6000)  # characters before and after a sign in which its message lies

_PREFIX = re.compile(
    r"""\s*(?:
      \[(?:rank|default|Rank\ )?(?P<a>\d{1,6})\]:          # torch, torchrun --tee
    | \[\d+,(?P<b>\d{1,6})\]<std(?:out|err)>:?             # Open MPI
    | (?P<c>\d{1,6}):\s                                    # srun --label
    | \((?P<d>[\w.:-]{1,60}\s+pid=\d+(?:,\s*ip=[\w.:]+)?)\) # Ray, vLLM
    | (?P<e>[\w.-]{1,60}):\s(?=\[?rank|\ *File|Traceback|torch|RuntimeError|\ {2})  # pdsh
    )\s?""",
    re.VERBOSE,
)
_RANK_IN_TEXT = re.compile(r"\brank[ :=_]?(\d{1,6})\b", re.IGNORECASE)
_MARGIN = re.compile(r"^[\s>#|│]*|[\s│|]*$")  # of quotations, comments and boxes
_FRAME = re.compile(r'File "(?P<file>[^"]{1,400})", line (?P<line>\d+), in (?P<function>\S{1,100})')
_BOXED = re.compile(r"(?P<file>/?[\w./-]{1,400}\.py):(?P<line>\d+) in (?P<function>\S{1,100})")
_NOT_THE_USERS = re.compile(
    r"site-packages|dist-packages|/lib/python\d|/torch/|<frozen|<string>|/oomph/"
)
_ENDS = re.compile(r'Traceback \(most|^\s*File "|^During handling|^The above exception')
_SETTINGS = re.compile(
    r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF[\"']?\s*[=:]\s*[\"']?([A-Za-z_0-9:,.\[\]>]{3,300})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What was found in a log."""

    messages: tuple[OomMessage, ...]  # in order; those that repeat each other are counted once
    num_lines: int
    settings: str | None  # the allocator's, where the log shows them
    script: str | None  # the file that the traceback begins with


def read_log(chunks: Iterable[bytes]) -> Log:
    """Find every out-of-memory message in a stream of bytes."""
    reader = _Reader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader.finish()


@dataclass(slots=True)
class _Open:
    """A message that may go on in the next lines."""

    channel: str
    rank: str | None
    line: int
    lines: list[str]
    message: OomMessage
    num_contributing: int
    where: str | None
    script: str | None

    def add(self, content: str) -> None:
        self.lines.append(content)
        longer = parse("\n".join(self.lines))
        if longer is not None and _facts(longer) != _facts(self.message):
            self.message, self.num_contributing = longer, len(self.lines)

    def closed(self) -> OomMessage:
        text = "\n".join(self.lines[: self.num_contributing])
        whole = parse(text) or self.message
        return replace(whole, rank=self.rank, line=self.line, where=self.where)


def _facts(message: OomMessage) -> OomMessage:
    return replace(message, text="")


@dataclass(slots=True)
class _Reader:
    rest: bytes = b""  # a line whose end has not come yet
    num_lines: int = 0
    num_begun: int = 0
    num_since: int = 0  # lines after those of the last message
    before: deque[bytes] = field(default_factory=lambda: deque(maxlen=_NUM_BEFORE))
    open: list[_Open] = field(default_factory=list)
    first: list[OomMessage] = field(default_factory=list)
    last: deque[OomMessage] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT // 2))
    settings: str | None = None
    script: str | None = None

    def feed(self, chunk: bytes) -> None:
        text = self.rest + chunk.replace(b"\r", b"\n")
        end = text.rfind(b"\n") + 1
        self.rest = text[end:]
        if end:
            self._lines(text[:end])
        while len(self.rest) > _LONGEST_LINE:  # a line without an end
            self._line(self.rest[:_LONGEST_LINE])
            self.rest = self.rest[_LONGEST_LINE - _OVERLAP :]

    def finish(self) -> Log:
        if self.rest:
            self.num_lines += 1
            self._line(self.rest)
        for one in list(self.open):
            self._close(one)
        return Log(
            messages=tuple(_in_order([*self.first, *self.last])),
            num_lines=self.num_lines,
            settings=self.settings,
            script=self.script,
        )

    def _lines(self, text: bytes) -> None:
        if not self.open and not _has_sign(text):
            self.num_lines += text.count(b"\n")
            self.before.extend(text[-(1 << 14) :].split(b"\n")[-_NUM_BEFORE:-1])
            return
        for line in text.split(b"\n")[:-1]:
            self.num_lines += 1
            for begin in range(0, max(len(line), 1), _LONGEST_LINE - _OVERLAP):
                self._line(line[begin : begin + _LONGEST_LINE])

    def _line(self, line: bytes) -> None:
        # A terminal may have broken a line within the words that a message begins with.
        is_candidate = _has_sign(b"".join((*self._last_two(), line)))
        if is_candidate or self.open:
            channel, content = _told_apart(_window(line))
            taken = self._continue(channel, content)
            if is_candidate:
                self._note_settings(content)
                if not taken:
                    taken = self._begin(channel, content)
            if taken:
                self.num_since = -1
        self.num_since += 1
        self.before.append(line)

    def _last_two(self) -> list[bytes]:
        return [
            self.before[at][-_OVERLAP:]
            for at in (-2, -1)
            if min(len(self.before), self.num_since) >= -at
        ]

    # ---- messages

    def _continue(self, channel: str, content: str) -> bool:
        """Add a line to the open message of its channel; return whether it belongs there."""
        for one in [one for one in self.open if self.num_lines - one.line > 4 * _NUM_AFTER]:
            self._close(one)
        same = [one for one in self.open if one.channel == channel]
        if not same:
            return False
        one = same[0]
        is_end = not content.strip() or _ENDS.search(content) or len(one.lines) > _NUM_AFTER
        squeezed = squeeze(content)
        is_new = opens(squeezed) and (one.message.has_figures or "Triedtoallocate" in squeezed)
        if is_end or is_new:
            self._close(one)
            return False
        one.add(content)
        return True

    def _begin(self, channel: str, content: str) -> bool:
        lines = [content]
        if not opens(squeeze(content)):
            lines = [*self._before(channel, min(3, self.num_since)), content]
            if not is_about_memory(squeeze("\n".join(lines))):
                return False
        message = parse("\n".join(lines))
        if message is None:
            return False
        where, script = None, None
        self.num_begun += 1
        if self.num_begun <= _NUM_PLACED:
            where, script = _place(self._before(channel, _NUM_BEFORE))
        rank = _rank(channel, content)
        begun = _Open(channel, rank, self.num_lines, lines, message, len(lines), where, script)
        self.open.append(begun)
        return True

    def _before(self, channel: str, num: int) -> list[str]:
        found: list[str] = []
        for line in reversed(self.before) if num else ():
            other, content = _told_apart(line)
            if other == channel:
                found.append(content)
            if len(found) == num:
                break
        return found[::-1]

    def _close(self, one: _Open) -> None:
        self.open.remove(one)
        message = one.closed()
        self.script = self.script or one.script
        kept = self.first if len(self.first) < _NUM_KEPT // 2 else self.last
        same = next((k for k in (*self.first, *self.last) if _repeats(k, message)), None)
        if same is None:
            kept.append(message)
            return
        counted = replace(same, num_seen=same.num_seen + 1, where=same.where or message.where)
        for known in (self.first, self.last):
            if same in known:
                known[known.index(same)] = counted

    def _note_settings(self, content: str) -> None:
        match = _SETTINGS.search(content)
        if match is None or "avoidfragmentation" in squeeze(content):
            return
        previous = self.before[-1].decode("utf-8", "replace") if self.before else ""
        if not squeeze(previous + content[: match.start()]).endswith("trysetting"):
            self.settings = match.group(1)


def _has_sign(text: bytes) -> bool:
    squeezed = text.translate(None, _BLANK).lower()
    return any(sign in squeezed for sign in _SIGNS)


def _window(line: bytes) -> bytes:
    """Return the part of a long line around the first sign in it."""
    before, after = _WINDOW
    if len(line) <= after:
        return line
    lowered = line.lower()
    for begin in range(0, len(line), before):
        if _has_sign(lowered[begin : begin + 2 * before]):
            return line[max(begin - before, 0) : begin + after]
    return line[:after]


def _repeats(known: OomMessage, message: OomMessage) -> bool:
    """Return whether a message is the known one again: a handler printed it once more."""
    known_facts = replace(known, text="", line=None, where=None, num_seen=1)
    return known_facts == replace(message, text="", line=None, where=None, num_seen=1)


def _in_order(messages: list[OomMessage]) -> Iterator[OomMessage]:
    yield from sorted(messages, key=lambda message: message.line or 0)


def _told_apart(line: bytes) -> tuple[str, str]:
    """Return the prefix that says which process wrote a line, and what it wrote."""
    text = line.decode("utf-8", "replace")
    match = _PREFIX.match(text)
    if match is None:
        return "", _MARGIN.sub("", text) if text.lstrip()[:1] in ">#|│" else text
    return match.group(0).strip(), text[match.end() :]


def _rank(channel: str, content: str) -> str | None:
    match = _PREFIX.match(f"{channel} ")
    if match is not None:
        return next(filter(None, match.groups()), None)
    named = _RANK_IN_TEXT.search(content[:200])
    return named.group(1) if named else None


def _place(lines: list[str]) -> tuple[str | None, str | None]:
    """Return the last place in the user's own code of the last traceback, and its first file."""
    begin = max((at for at, line in enumerate(lines) if "Traceback (most" in line), default=0)
    frames = [match for line in lines[begin:] if (match := _FRAME.search(line))]
    frames = frames or [match for line in lines[begin:] if (match := _BOXED.search(line))]
    own = [frame for frame in frames if not _NOT_THE_USERS.search(frame["file"])]
    if not own:
        return None, None
    last = own[-1]
    return f"{last['file']}:{last['line']} in {last['function']}", own[0]["file"]
