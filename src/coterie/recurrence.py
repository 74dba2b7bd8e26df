"""When a recurring message is due: parses `every` and computes the due times.

`every` is an interval (`15m`, `every 2 hours`) or a time of day on some days (`daily 08:00`, `weekdays 08:00`,
`mon,thu 18:30`, `monthly 1 09:00`, `monthly last 09:00`) or five fields of cron, followed by an IANA time zone. Days
become cron fields, which cronsim evaluates as Debian's cron does: a local time that the clocks skip is due at the
first minute after the gap, and one that they repeat is due once, the first time.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from coterie.errors import Refused
from coterie.text import closest_match, one_line

MIN_INTERVAL = timedelta(minutes=1)
MAX_INTERVAL = timedelta(days=3653)
MAX_COUNTED = 1_000
"""Missed occurrences are counted up to this number. A year of minutes would take seconds to count."""
MAX_LENGTH = 200
EXPECTED = (
    'expected "15m", "2 hours", "daily 08:00", "weekdays 08:00", "mon,thu 18:30", "monthly 1 09:00" or five cron'
    ' fields, then a time zone such as "Europe/Berlin"'
)

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_INTERVAL = re.compile(
    r"(?P<count>\d{1,9})? ?(?P<unit>m|min|mins|minutes?|h|hours?|d|days?|w|weeks?)(?: (?P<zone>\S+))?", re.IGNORECASE
)
_TIME_OF_DAY = re.compile(
    r"(?P<days>monthly (?:\d{1,2}|last)|[a-z,-]+)(?: at)? (?P<hour>\d{1,2}):(?P<minute>\d\d)(?: (?P<zone>\S+))?",
    re.IGNORECASE,
)
_CRON = re.compile(r"(?P<fields>\S+ \S+ \S+ \S+ \S+)(?: (?P<zone>\S+))?")
_DAY_NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_SETS = {"daily": "*", "day": "*", "weekdays": "mon-fri", "weekday": "mon-fri", "weekends": "sat,sun"}
_REFERENCE = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Recurrence:
    text: str
    """The canonical form, with the time zone: `weekdays 08:00 Europe/Berlin`. `parse_recurrence` reads it again."""
    interval: timedelta | None = None
    cron: str = ""
    """Five fields, if `interval` is None."""
    zone: ZoneInfo | None = None

    def first(self, now: datetime, delay: timedelta = timedelta(0)) -> datetime:
        """The first due time after `now`; with a delay, the first one that is not before `now + delay`."""
        if self.interval:
            return now + (delay or self.interval)
        if not delay:
            return next(self._occurrences(now))
        start = now + delay
        return next(due for due in self._occurrences(start - timedelta(seconds=1)) if due >= start)

    def following(self, due: datetime, now: datetime) -> datetime:
        """The first due time after `now` that follows the due time `due`."""
        if self.interval:
            return due + self.interval * (max(timedelta(0), now - due) // self.interval + 1)
        return next(self._occurrences(max(due, now)))

    def count(self, after: datetime, until: datetime) -> int:
        """Number of due times after `after`, a due time, up to `until`; at most `MAX_COUNTED`."""
        if until <= after:
            return 0
        if self.interval:
            return min(MAX_COUNTED, (until - after) // self.interval)
        return sum(1 for _ in islice(takewhile(lambda due: due <= until, self._occurrences(after)), MAX_COUNTED))

    def _occurrences(self, after: datetime) -> Iterator[datetime]:
        """Due times after `after`, in UTC."""
        for local in CronSim(self.cron, after.astimezone(self.zone)):
            due = local.astimezone(UTC)
            # In the hour that the clocks repeat, cronsim gives the first of the two times, which may be over.
            if due > after:
                yield due


def parse_recurrence(every: object, time_zone: object = None) -> Recurrence:
    """Return the recurrence, or raise `Refused("every_invalid")`. Default time zone: that of this machine."""
    if not isinstance(every, str):
        raise _invalid(f"every must be a string, got {one_line(repr(every), 60)}: {EXPECTED}")
    if time_zone is not None and not isinstance(time_zone, str):
        raise _invalid(f"timeZone must be the name of a time zone, got {one_line(repr(time_zone), 60)}")
    if len(every) > MAX_LENGTH or len(time_zone or "") > MAX_LENGTH:
        raise _invalid(f"every and timeZone have at most {MAX_LENGTH} characters each")
    return _parse(every, time_zone or None)


@lru_cache(maxsize=256)
def _parse(every: str, time_zone: str | None) -> Recurrence:
    text = " ".join(every.split())
    text = text[6:] if text[:6].lower() == "every " else text
    if found := _INTERVAL.fullmatch(text):
        _read_zone(found["zone"], time_zone)  # of no effect, but a wrong name is an error
        return _read_interval(int(found["count"] or 1), _UNITS[found["unit"][0].lower()])
    if found := _TIME_OF_DAY.fullmatch(text):
        days, hour, minute = found["days"].lower(), int(found["hour"]), int(found["minute"])
        if hour > 23 or minute > 59:
            raise _invalid(f"{found['hour']}:{found['minute']} is not a time of day: expected 00:00 to 23:59")
        month_day, week_days = _read_days(days)
        cron, shown = f"{minute} {hour} {month_day} * {week_days}", f"{days} {hour:02}:{minute:02}"
    elif found := _CRON.fullmatch(text):
        cron = shown = found["fields"]
    else:
        raise _invalid(f"every cannot be read: {EXPECTED}, got {one_line(every, 60)!r}")
    zone = _read_zone(found["zone"], time_zone)
    recurrence = Recurrence(f"{shown} {zone.key}", cron=cron, zone=zone)
    try:
        next(recurrence._occurrences(_REFERENCE))
    except CronSimError as error:
        raise _invalid(f"the cron fields {one_line(cron, 60)!r} cannot be read ({error}): {EXPECTED}") from None
    except (StopIteration, RuntimeError, OverflowError):
        raise _invalid(f"{one_line(shown, 60)!r} is never due: choose a day that exists") from None
    return recurrence


def _read_interval(count: int, unit: str) -> Recurrence:
    try:
        interval = timedelta(**{unit: count})
    except OverflowError:
        interval = timedelta.max
    if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
        raise _invalid(f"an interval is a minute to ten years, got {count} {unit}")
    return Recurrence(f"{count} {unit if count != 1 else unit[:-1]}", interval=interval)


def _read_days(days: str) -> tuple[str, str]:
    """The cron fields of the days of the month and of the week."""
    if days.startswith("monthly "):
        number = days.removeprefix("monthly ")
        if number != "last" and not 1 <= int(number) <= 31:
            raise _invalid(f'monthly {number}: expected a day of the month, 1 to 31, or "last"')
        return "L" if number == "last" else number, "*"
    if days in _DAY_SETS:
        return "*", _DAY_SETS[days]
    names = []
    for part in days.split(","):
        ends = [name[:3] for name in part.split("-") if name[:3] in _DAY_NAMES and _is_day(name)]
        if len(ends) != part.count("-") + 1 or len(ends) > 2:
            raise _invalid(f"{one_line(part, 40)!r} is not a day of the week: {EXPECTED}")
        first, last = _DAY_NAMES.index(ends[0]), _DAY_NAMES.index(ends[-1])
        names += [_DAY_NAMES[n % 7] for n in range(first, last + 1 if last >= first else last + 8)]
    return "*", ",".join(dict.fromkeys(names))


def _is_day(name: str) -> bool:
    full = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
    return len(name) >= 3 and any(day.startswith(name) for day in full)


def _read_zone(inline: str | None, parameter: str | None) -> ZoneInfo:
    """The time zone that ends `every` or that was given beside it; by default that of this machine."""
    if inline and parameter and inline != parameter:
        raise _invalid(f"every names the time zone {one_line(inline, 40)!r}, but timeZone is another: give one of them")
    name = inline or parameter or local_time_zone()
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # OSError: the name of a folder, such as "Europe"
        meant = closest_match(name, available_timezones())
        hint = f", did you mean {meant!r}?" if meant else ': expected an IANA name such as "Europe/Berlin"'
        raise _invalid(f"there is no time zone {one_line(name, 40)!r}{hint}") from None


@cache
def local_time_zone() -> str:
    """The name of this machine's time zone; UTC if it has none."""
    from tzlocal import get_localzone_name  # reads files of the machine: only if no zone is given

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a machine whose files contradict each other
            name = get_localzone_name()
        ZoneInfo(name or "")
    except (LookupError, ValueError, OSError):
        return "UTC"
    return name


def _invalid(message: str) -> Refused:
    return Refused("every_invalid", message)
