"""Classifies lines that are not part of an exception, by their writer: a library's message, a log's
complaint, a process's exit.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from .catalogue import Sign, first_sign, signs
from .causes import Weight

# a line of slurmctld or slurmd
DAEMON = re.compile(r"\[\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}\] (?:\[[\w.]+\] )?(?:\w+: )?")
# an error or the end of a process, as c10 logs it
SEVERE = re.compile(r"\[[EF]\d* ?[^\]]*\.cpp:\d+\] ")
LOGGED = re.compile(
    r"(?:\[?(?:ERROR|CRITICAL|FATAL)\]?(?:[: ]\S*?[: ]| - )|[-|\w. ]{0,60} - "
    r"(?:ERROR|CRITICAL|FATAL) - )\s*"
)
CONJECTURE = re.compile(
    r"(?i)(?:some |the )?(?:potential|possible|likely|common) (?:root )?(?:causes?|reasons?)\b"
)
PARTING = re.compile(
    r"(?i)\b(?:stopping|abort(?:ing|ed)|exiting|quitting|giving up|terminating|(?:can ?no|can.)t "
    r"continue)\b"
)
COMPLAINT = re.compile(
    r"(?i)^(?!.*(?:warn|ignor|deprecat|retrying|retry (?:in|after|#|\d)|(?:will|to) retry|retry "
    r"loop|fall(?:ing)? back|skip|if you see|means that))"
    r".*\b(?:fail(?:ed|ure)|error|fatal|unable|can ?not|could "
    r"not|can.t|denied|refused|lost|killed|corrupt(?:ed)?|\w+(?:Error|Exception))\b"
)
# an exception quoted behind other words
QUOTED = re.compile(
    r"^(?![\w.]*(?:Error|Exception): ).*?[^\w.]((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b.*)"
)
ENDED = re.compile(  # the end of a process, reported by its launcher
    r"(?i)(?:\brank (?P<rank>\d+)\b.{0,200}?)?\b"
    r"(?:(?:exit(?:s|ed)?|exitcode|return(?:s|ed)?|ended|crashed)[ "
    r"a-z_(]{0,20}(?:code|status)?\W{0,4}(?P<code>-\d{1,2}|1[2-9]\d)"
    r"|(?:exited|killed|terminated|died|crashed)(?: (?:by|on|of|with|from|due to))?:? signal:? "
    r"(?P<signal>\d+))\b"
)
CUDA = re.compile(r"Cuda failure (?:\d+ )?'(?P<what>[^']+)'")
FOLLOWED = re.compile(  # a launcher's line about processes that it ended itself
    r"(?i)\b(?:clean|terminat|stopp|kill|end|cancel)\w* (?:up )?(?:the )?(?:\w+ "
    r"){0,2}(?:other|remaining|rest)\b"
)
# writers that see processes from outside: their lines are not a process's output
OUTSIDE = ("kernel", "watch")
Found = tuple[Sign, re.Match[str]]


def meant(who: str, text: str) -> Found | None:
    """Returns the meaning of a line that is not part of an exception, by what its writer may
    say.
    """
    if who in OUTSIDE:
        return first_sign((who, "any"), text)
    by = ("library", "any") if who == "rank" else ("library", "any", "agent")
    if daemon := DAEMON.match(text):
        return first_sign(("agent",), text[daemon.end() :]) or first_sign(("agent",), text)
    if (
        (severe := SEVERE.match(text))
        and (found := first_sign((*by, "error"), rest := text[severe.end() :]))
        and found[0].firm
    ):
        return _reasoned(found, by, rest)
    if logged := LOGGED.match(text):
        text = text[logged.end() :]
        return _mild(_reasoned(first_sign((*by, "error"), text), by, text)) or implied(
            f"error: {text}", by
        )
    text = stated(text)
    if not any(word in text for group in by for word in _words(group)):
        return implied(text, by)
    found = first_sign(by, text)
    if (told := implied(text, by)) and (found is None or found[0].weight < told[0].weight):
        found = told
    # schedulers put one reason behind another
    if found is None and who == "agent" and (parts := text.split(" - ")[1:]):
        return next(filter(None, (first_sign(by, part) for part in parts)), None)
    return _reasoned(found, by, text)


def _reasoned(found: Found | None, by: tuple[str, ...], text: str) -> Found | None:
    """Returns the reason that a line quotes for its complaint if that is another cause: `Failed
    compilation: no such library`.
    """
    if (
        found is None
        or found[0].closed
        or found[0].weight != Weight.WORD
        or ": " not in text[found[1].end() :]
    ):
        return found
    reason = first_sign((*by, "error"), text[found[1].end() :])
    other = (
        reason is not None
        and reason[0].firm
        and reason[0].weight == Weight.WORD
        and reason[0].cause != found[0].cause
    )
    return reason and (replace(reason[0], closed=False), reason[1]) if other else found


def implied(text: str, by: tuple[str, ...]) -> Found | None:
    """Returns the meaning of a line that no library wrote: a quoted CUDA error, an exit code, last
    words.
    """
    if match := CUDA.search(text):
        return first_sign(("error",), f"CUDA error: {match['what']}")
    if "agent" in by and (match := ENDED.search(text)) and not FOLLOWED.search(text):
        code = int(match["signal"] or match["code"])
        rank = f" of rank {match['rank']}" if match["rank"] else ""
        return first_sign(("exit",), f"signal {abs(code) if code < 128 else code - 128}{rank}")
    if PARTING.search(text):
        return _unsure(first_sign((*by, "error"), text))
    if not COMPLAINT.search(text):
        return None
    named = QUOTED.search(text)
    inner = (
        (first_sign((*by, "error"), named[1]) or first_sign(("program",), named[1]))
        if named
        else None
    )
    return _mild(firmer(inner, first_sign((*by, "error"), text)) or inner)


def _unsure(found: Found | None) -> Found | None:
    return found and (replace(found[0], firm=False, closed=False), found[1])


def firmer(inner: Found | None, whole: Found | None) -> Found | None:
    """Chooses between an exception's last named part and the entire message: the part if it weighs
    as much.
    """
    return (
        inner
        if inner and inner[0].firm and (not whole or inner[0].weight >= whole[0].weight)
        else whole
    )


def stated(text: str) -> str:
    """Returns a text without the guesses at causes that some libraries add: they would be read as
    causes.
    """
    match = CONJECTURE.search(text)
    return text[: match.start()] if match else text


def _mild(found: Found | None) -> Found | None:
    """Weakens a complaint that a program only logged to a hint: it may have recovered."""
    return found and (
        replace(found[0], weight=min(found[0].weight, Weight.HINT), firm=False, closed=False),
        found[1],
    )


@functools.cache
def _words(group: str) -> tuple[str, ...]:
    """Returns words, at least one of which is in every line with a sign of this group."""
    every = {word for sign in signs().get(group, ()) for word in sign.about}
    return (*every, "NVRM", "kernel:") if group == "agent" else tuple(every)
