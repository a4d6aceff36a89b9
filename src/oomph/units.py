"""Text <-> numbers with units: "24GiB" <-> 25769803776. The only file that knows 1024.

Inside oomph a size is an int of bytes and its name ends in `_bytes`; GiB appears only on screen. GB
is the decimal unit, as in SI and on disks; "24G" is read as GiB, as Slurm and most schedulers do.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_BYTES_PER_UNIT = {
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 1000,
    "m": MIB,
    "mib": MIB,
    "mb": 1000**2,
    "g": GIB,
    "gib": GIB,
    "gb": 1000**3,
    "t": TIB,
    "tib": TIB,
    "tb": 1000**4,
}

_SECONDS_PER_UNIT = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_bytes(text: str) -> int:
    """Parse a size as a person writes it.

    >>> parse_bytes("24GiB"), parse_bytes("1.5 g"), parse_bytes("512")
    (25769803776, 1610612736, 512)
    """
    from oomph.errors import UsageError

    number, unit = _number_and_unit(text)
    try:
        size = float(number) * _BYTES_PER_UNIT[unit or "b"]
        if not 0 <= size < 2**63:
            raise ValueError(size)
        return int(size)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{text!r} is not a size",
            because="a size is a number and a unit: B, KiB, MiB, GiB, TiB (or kB, MB, GB, TB)",
            attempt="24GiB",
        ) from error


def _number_and_unit(text: str) -> tuple[str, str]:
    written = text.strip().lower()
    number = written.rstrip("abcdefghijklmnopqrstuvwxyz ")
    return number, written[len(number) :].strip()


def format_bytes(size_bytes: int) -> str:
    """Format a size for a person, in the largest binary unit that gives at least 1.

    >>> format_bytes(25769803776), format_bytes(1500 * 2**20), format_bytes(0)
    ('24.0 GiB', '1.5 GiB', '0 B')
    """
    for unit_bytes, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"


def format_gib(size_bytes: int, *, decimals: int = 1) -> str:
    """Return the bare number of GiB, for a column whose heading has the unit.

    >>> format_gib(25769803776)
    '24.0'
    """
    return f"{size_bytes / GIB:.{decimals}f}"


def format_ratio(ratio: float) -> str:
    """Format a ratio as a whole percentage.

    >>> format_ratio(0.256)
    '26%'
    """
    return f"{ratio:.0%}"


def format_rate(per_s: float) -> str:
    """Format with three significant figures and never an exponent.

    >>> format_rate(40.512), format_rate(1203.7), format_rate(366_541.0)
    ('40.5', '1,200', '367,000')
    """
    if per_s < 1000:
        return f"{per_s:.3g}"
    return f"{float(f'{per_s:.3g}'):,.0f}"


def parse_duration(text: str) -> float:
    """Parse a time as a person writes it, in seconds.

    >>> parse_duration("90s"), parse_duration("5m"), parse_duration("1.5h"), parse_duration("20")
    (90.0, 300.0, 5400.0, 20.0)
    """
    from oomph.errors import UsageError

    number, unit = _number_and_unit(text)
    try:
        seconds = float(number) * _SECONDS_PER_UNIT[unit]
        if not 0 < seconds < 1e9:
            raise ValueError(seconds)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{text!r:.40} is not a time",
            because="a time is a number and a unit: s, m (or min), h, d",
            attempt="90s, 5m or 2h",
        ) from error
    return seconds


def seconds_of(time: float | str | None) -> float | None:
    """Return seconds as they are, or parse them; None stays None.

    >>> seconds_of("1m"), seconds_of(2.5), seconds_of(None)
    (60.0, 2.5, None)
    """
    return time if time is None else parse_duration(str(time))


def format_duration(seconds: float) -> str:
    """Format a duration in the one or two units that matter.

    >>> format_duration(42), format_duration(3 * 3600 + 125), format_duration(5 * 86400)
    ('42 s', '3 h 2 min', '5 d')
    """
    total = max(0, int(seconds))
    for unit_s, unit, smaller_s, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if total >= unit_s:
            rest = total % unit_s // smaller_s
            return f"{total // unit_s} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{total} s"


def format_time(seconds: float) -> str:
    """Format a time that may be far below a second, as of a training step.

    >>> format_time(0.0421), format_time(1.5), format_time(125)
    ('42.1 ms', '1.5 s', '2 min 5 s')
    """
    if seconds >= 60:
        return format_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
