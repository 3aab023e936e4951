"""Removal of mpirun's notices from its output."""

import pytest

from neondist.launcher.mpirun_notices import NoticeFilter

DASHED_LINE = b"-" * 74 + b"\n"
EXIT_NOTICE = (
    DASHED_LINE
    + b"prterun detected that one or more processes exited with non-zero status,\nthus causing it to be terminated.\n"
    + DASHED_LINE
)
ABORT_NOTICE = (
    DASHED_LINE
    + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 1\n\nNOTE: x\n"
    + DASHED_LINE
)
EARLY_EXIT_NOTICE = (
    DASHED_LINE + b"prterun has exited due to process rank 1 with PID 0 on node vm calling\n" + DASHED_LINE + b"\n"
)
SIGNAL_NOTICE = DASHED_LINE + b"prterun noticed that process rank 1 exited on signal 9 (Killed).\n" + DASHED_LINE
LOST_NODE_NOTICE = (
    DASHED_LINE
    + b"PRTE has lost communication with a remote daemon.\n\n  HNP daemon   : [prterun-vm-1@0,0] on node vm\n"
    + (b"  Remote daemon: [prterun-vm-1@0,3] on node nodeC\n\nThis is\n" + DASHED_LINE)
)
LOST_SSH_NOTICE = (
    DASHED_LINE
    + b"A daemon failed to report back after being spawned. This could\nbe due to several factors\n\n"
    + (b"  Local host:    vm\n  Remote host:   nodeB\n  Daemon exit status: 255\n\ntry again.\n" + DASHED_LINE)
)


def filter_chunks(data, size, **options):
    notices = NoticeFilter(**options)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(map(notices.feed, chunks)) + notices.flush()


@pytest.mark.parametrize("size", [1, 7, 75, 10_000])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"error: x\n" + EXIT_NOTICE, b"error: x\n"),
        (b"trace\n" + ABORT_NOTICE + EARLY_EXIT_NOTICE + b"more\n", b"trace\nmore\n"),
        (
            b"trace\n" + ABORT_NOTICE + b"late line of another rank\n" + EARLY_EXIT_NOTICE,
            b"trace\nlate line of another rank\n",
        ),
        (b"trace\n" + EARLY_EXIT_NOTICE + b"\0error: x\n\0", b"trace\nerror: x\n"),
        (b"[warn] Epoll MOD(4) on fd 20 failed. Old events\nx\n", b"x\n"),
        (b"[warning] mine\n[warn] Ep", b"[warning] mine\n[warn] Ep"),
        (b"[vm:0712] PMIX ERROR: PMIX_ERR_UNREACH in file x.c at line 3146\nx\n", b"x\n"),
        (b"[vm:0712] PMIX ERROR: PMIX_ERR_INIT in file x.c\n", b"[vm:0712] PMIX ERROR: PMIX_ERR_INIT in file x.c\n"),
        (SIGNAL_NOTICE, b""),
        (LOST_NODE_NOTICE + b"[nodeC:0] *** MPI_ERRORS_ARE_FATAL (processes\nx\n", b"x\n"),
        (b"a\n\nb\n", b"a\n\nb\n"),
        (b"no end", b"no end"),
        (DASHED_LINE + b"one rule only\n", DASHED_LINE + b"one rule only\n"),
        (b"--- short\n", b"--- short\n"),
        (b"10%\r20%\rdone\n", b"10%\r20%\rdone\n"),
        (b"", b""),
    ],
)
def test_filter(data, expected, size):
    assert filter_chunks(data, size) == expected


@pytest.mark.parametrize("size", [1, 7, 75, 10_000])
def test_filter_of_stdout(size):
    table = DASHED_LINE + b"loss 1\n" + DASHED_LINE + b"[####"
    assert filter_chunks(table + b"\n" + LOST_SSH_NOTICE + b"x\n", size, filters_warnings=False) == table + b"\nx\n"
    for line in b"[warn] Epoll\n", b"[vm:0] *** mine\n":
        assert filter_chunks(line, size, filters_warnings=False) == line


@pytest.mark.parametrize("text", [b"[####", DASHED_LINE + b"loss 1\n", DASHED_LINE + b"loss 1\n[###"])
def test_output_of_ranks_is_not_held_back(text):
    assert NoticeFilter(filters_warnings=False).feed(text) == text


def test_incomplete_lines_are_passed_through_immediately():
    assert NoticeFilter().feed(b"epoch 1 ...") == b"epoch 1 ..."


@pytest.mark.parametrize(
    ("output", "has_output"), [(b"", False), (b"\n \n", False), (b"error: x\n", True), (b"10%", True)]
)
def test_notices_are_kept_for_silent_jobs(output, has_output):
    messages = NoticeFilter()
    for data in (output, EXIT_NOTICE):
        messages.feed(data)
    messages.flush()
    assert (messages.has_output, messages.notices) == (has_output, EXIT_NOTICE)


def test_lost_nodes_and_ranks_in_notices():
    messages = NoticeFilter()
    messages.feed(LOST_NODE_NOTICE + SIGNAL_NOTICE + b"[nodeC:0] *** on a NULL communicator\n")
    assert (messages.lost_nodes, messages.signals_by_rank) == (("nodeC",), {1: "signal 9 (Killed)"})
    assert messages.fatal_lines == b"[nodeC:0] *** on a NULL communicator\n"
    messages.feed(LOST_SSH_NOTICE)
    assert messages.lost_nodes == ("nodeC", "nodeB")
    assert (NoticeFilter().lost_nodes, NoticeFilter().signals_by_rank) == ((), {})
