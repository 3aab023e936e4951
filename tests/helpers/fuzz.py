"""Damaged files, and a way to try many of them that survives what they do.

    outcomes = survive(damaged(raw, 500), lambda case: outcome(lambda: read(case)))
    check_outcomes(outcomes)        # each is 'fine' or 'refused: MESSAGE'

Cases run in a child process, so that one that crashes, hangs or asks for all memory is an outcome and not the end.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import random
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil

from neondist.errors import UserError

SECONDS = 60  # without an answer a case hangs; the machine may be busy
MEMORY = 2 << 30  # what a case may ask for, beside what the tests have


def damaged(raw: bytes, count: int, seed: int = 0, head: int = 4096) -> Iterator[bytes]:
    """Yield `count` copies of a file: cut short, bits flipped (every other one in the first `head` bytes), bytes lost,
    zeroed, repeated, or numbers made extreme."""
    draw = random.Random(seed)
    for case in range(count):
        part = len(raw) if case % 2 else min(head, len(raw))
        yield _DAMAGE[case // 2 % len(_DAMAGE)](bytearray(raw), part, draw)


def _cut(raw: bytearray, part: int, draw: random.Random) -> bytes:
    return bytes(raw[: draw.randrange(part)])


def _flip(raw: bytearray, part: int, draw: random.Random) -> bytes:
    for _ in range(draw.choice([1, 1, 1, 2, 5, 20])):
        raw[draw.randrange(part)] ^= 1 << draw.randrange(8)
    return bytes(raw)


def _zero(raw: bytearray, part: int, draw: random.Random) -> bytes:
    at, n = draw.randrange(part), draw.choice([1, 8, 64, 512])
    return bytes(raw[:at] + bytes(len(raw[at : at + n])) + raw[at + n :])


def _move(raw: bytearray, part: int, draw: random.Random) -> bytes:
    at, n = draw.randrange(part), draw.choice([1, 2, 8, 100])
    return bytes(raw[:at] + (raw[at + n :] if draw.random() < 0.5 else raw[max(0, at - n) :]))


def _extreme(raw: bytearray, part: int, draw: random.Random) -> bytes:
    at, n = draw.randrange(part), draw.choice([1, 2, 4, 8])
    raw[at : at + n] = draw.choice([b"\xff", b"\x7f", b"\x80", b"\x00"]) * min(n, len(raw) - at)
    return bytes(raw)


_DAMAGE = (_cut, _flip, _flip, _zero, _move, _extreme, _flip)


def outcome(call: Callable[[], Any]) -> str:
    """Return 'fine', 'refused: MESSAGE' for a user's error of one line, or what went wrong, beginning with 'BAD'."""
    try:
        call()
    except UserError as error:
        text = str(error)
        return f"refused: {text}" if text and text.isprintable() else f"BAD message {text!r}"
    except BaseException:
        return f"BAD {traceback.format_exc()}"
    return "fine"


def typed(*argv: object) -> str:
    """Return the outcome of a command: 'fine', or 'refused: MESSAGE' if it prints one message and returns 2."""
    from neondist.cli import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(word) for word in argv])
    except BaseException:
        return f"BAD {traceback.format_exc()}"
    text = err.getvalue()
    if code == 0:
        return "fine" if not text else f"BAD: exit code 0, but it says {text!r}"
    message = text.removeprefix("error: ").removesuffix("\n")
    good = code == 2 and text == f"error: {message}\n" and message.isprintable()
    return f"refused: {message}" if good else f"BAD: exit code {code}, message {text!r}"


def survive(cases: Iterable[Any], call: Callable[[Any], str]) -> list[str]:
    """Return call(case), an outcome, of each case in order; or 'BAD: died ...' or 'BAD: hangs'."""
    cases, outcomes = list(cases), []
    while len(outcomes) < len(cases):
        read, write = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read)
            _try_all(cases[len(outcomes) :], call, write)
        os.close(write)
        found, hangs = _collect(read, child)
        outcomes += found
        os.close(read)
        _, status = os.waitpid(child, 0)
        if hangs:
            outcomes.append("BAD: hangs")
        elif os.WIFSIGNALED(status):
            outcomes.append(f"BAD: died of {signal.Signals(os.WTERMSIG(status)).name}")
        elif status:
            raise RuntimeError(f"the child that tries case {len(outcomes)} failed; what it says is above")
    return outcomes[: len(cases)]


def _try_all(cases: list, call: Callable, write: int) -> None:
    """Work through the cases in the child, telling each outcome as a line of JSON; never returns."""
    try:
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        with os.fdopen(write, "w", buffering=1) as pipe:
            for case in cases:
                pipe.write(json.dumps(call(case)) + "\n")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _collect(read: int, child: int) -> tuple[list[str], bool]:
    """Return the outcomes up to the end of the child, and whether it had to be killed because nothing came."""
    buffer = b""
    while True:
        ready, _, _ = select.select([read], [], [], SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        piece = os.read(read, 1 << 16) if ready else b""
        buffer += piece
        if not piece:
            return [json.loads(line) for line in buffer.splitlines()], not ready


def check_outcomes(outcomes: list[str], least_refused: int = 1) -> collections.Counter:
    """Fail on any bad outcome, and if hardly any case was refused, which says that the damage does none."""
    bad = {at: text for at, text in enumerate(outcomes) if text.startswith("BAD")}
    some = "\n".join(f"case {at}: {text}" for at, text in list(bad.items())[:10])
    assert not bad, f"{len(bad)} of {len(outcomes)}:\n{some}"
    counts = collections.Counter(text.partition(":")[0] for text in outcomes)
    assert counts["refused"] >= least_refused, counts
    return counts
