"""Generation of damaged files, and their processing in child processes.

    outcomes = run_isolated(damage_copies(raw, 500), lambda case: classify_call(lambda: read(case)))
    check_outcomes(outcomes)  # each is 'fine' or 'refused: MESSAGE'

A case that crashes, hangs or exhausts the memory is an outcome and does not end the test.
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
from cli_runs import strip_progress_lines

from neondist.errors import UserError

TIMEOUT_SECONDS = 60  # timeout of a case on a busy machine
MEMORY_LIMIT_BYTES = 2 << 30  # limit of a case, in addition to the memory of the tests


def damage_copies(raw: bytes, count: int, seed: int = 0, head: int = 4096) -> Iterator[bytes]:
    """Yield `count` damaged copies of a file, every other one within its first `head` bytes.

    Copies are truncated, or have bits flipped, bytes removed, zeroed or repeated, or numbers set to extremes.
    """
    rng = random.Random(seed)
    for case in range(count):
        part = len(raw) if case % 2 else min(head, len(raw))
        yield _DAMAGE_FUNCTIONS[case // 2 % len(_DAMAGE_FUNCTIONS)](bytearray(raw), part, rng)


def _cut(raw: bytearray, part: int, rng: random.Random) -> bytes:
    return bytes(raw[: rng.randrange(part)])


def _flip(raw: bytearray, part: int, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        raw[rng.randrange(part)] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _zero(raw: bytearray, part: int, rng: random.Random) -> bytes:
    start, n = rng.randrange(part), rng.choice([1, 8, 64, 512])
    return bytes(raw[:start] + bytes(len(raw[start : start + n])) + raw[start + n :])


def _move(raw: bytearray, part: int, rng: random.Random) -> bytes:
    start, n = rng.randrange(part), rng.choice([1, 2, 8, 100])
    return bytes(raw[:start] + (raw[start + n :] if rng.random() < 0.5 else raw[max(0, start - n) :]))


def _extreme(raw: bytearray, part: int, rng: random.Random) -> bytes:
    start, n = rng.randrange(part), rng.choice([1, 2, 4, 8])
    raw[start : start + n] = rng.choice([b"\xff", b"\x7f", b"\x80", b"\x00"]) * min(n, len(raw) - start)
    return bytes(raw)


_DAMAGE_FUNCTIONS = (_cut, _flip, _flip, _zero, _move, _extreme, _flip)


def classify_call(call: Callable[[], Any]) -> str:
    """Return 'fine', 'refused: MESSAGE' for a one-line UserError, or a description that begins with 'BAD'."""
    try:
        call()
    except UserError as error:
        text = str(error)
        return f"refused: {text}" if text and text.isprintable() else f"BAD message {text!r}"
    except BaseException:
        return f"BAD {traceback.format_exc()}"
    return "fine"


def classify_command(*argv: object) -> str:
    """Return the outcome of a command: 'fine', 'refused: MESSAGE' for one message and exit code 2, or 'BAD ...'."""
    from neondist.cli import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(word) for word in argv])
    except BaseException:
        return f"BAD {traceback.format_exc()}"
    text = strip_progress_lines(err.getvalue())
    if code == 0:
        return "fine" if not text else f"BAD: exit code 0, stderr {text!r}"
    message = text.removeprefix("error: ").removesuffix("\n")
    good = code == 2 and text == f"error: {message}\n" and message.isprintable()
    return f"refused: {message}" if good else f"BAD: exit code {code}, message {text!r}"


def run_isolated(cases: Iterable[Any], call: Callable[[Any], str]) -> list[str]:
    """Return the outcome call(case) of each case in order, or 'BAD: died ...' or 'BAD: hangs'."""
    cases, outcomes = list(cases), []
    while len(outcomes) < len(cases):
        read, write = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read)
            _try_all(cases[len(outcomes) :], call, write)
        os.close(write)
        results, hung = _collect(read, child)
        outcomes += results
        os.close(read)
        _, status = os.waitpid(child, 0)
        if hung:
            outcomes.append("BAD: hangs")
        elif os.WIFSIGNALED(status):
            outcomes.append(f"BAD: died of {signal.Signals(os.WTERMSIG(status)).name}")
        elif status:
            raise RuntimeError(f"the child process failed at case {len(outcomes)}; its traceback is above")
    return outcomes[: len(cases)]


def _try_all(cases: list, call: Callable, write: int) -> None:
    """Run the cases in the child process and write each outcome as a line of JSON; never returns."""
    try:
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT_BYTES, size + MEMORY_LIMIT_BYTES))
        with os.fdopen(write, "w", buffering=1) as pipe:
            for case in cases:
                pipe.write(json.dumps(call(case)) + "\n")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _collect(read: int, child: int) -> tuple[list[str], bool]:
    """Return the outcomes up to the end of the child, and whether it was killed after a timeout."""
    buffer = b""
    while True:
        ready, _, _ = select.select([read], [], [], TIMEOUT_SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        piece = os.read(read, 1 << 16) if ready else b""
        buffer += piece
        if not piece:
            return [json.loads(line) for line in buffer.splitlines()], not ready


def check_outcomes(outcomes: list[str], least_refused: int = 1) -> collections.Counter:
    """Fail on any bad outcome, or if fewer than `least_refused` cases were refused."""
    bad = {start: text for start, text in enumerate(outcomes) if text.startswith("BAD")}
    examples = "\n".join(f"case {start}: {text}" for start, text in list(bad.items())[:10])
    assert not bad, f"{len(bad)} of {len(outcomes)}:\n{examples}"
    counts = collections.Counter(text.partition(":")[0] for text in outcomes)
    assert counts["refused"] >= least_refused, counts
    return counts
