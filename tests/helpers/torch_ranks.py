"""Ranks of torch.distributed, as torchrun starts them: `torch_ranks.py RANKS SCRIPT.py`, or `RANKS PYTEST-ARGUMENTS`.

Ranks are forked, so that PyTorch is imported once. RANKS may be several numbers, 1,2,3, for consecutive jobs.
"""

import gc
import os
import runpy
import signal
import sys
import traceback


def main(ranks, arguments):
    """Run a job; return the exit code of the first rank that fails, after terminating the others, or 0."""
    import pytest
    import torch.distributed

    import neondist.torch.exchange.transport  # noqa: F401

    if not arguments[0].endswith(".py"):  # tests capture modules, which needs it
        import torch._dynamo
    gc.freeze()  # garbage collection in a rank would copy shared pages

    reader, writer = os.pipe()
    running = set()
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            port = os.read(reader, 8).decode().strip()
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_RUN_ID="tests",
            )  # fmt: skip
            exit_with(run_script if arguments[0].endswith(".py") else pytest.main, arguments)
        running.add(pid)
    # the store is bound to a free port before the ranks use it, as by torchrun's agent
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, b"%8d" % store.port * ranks)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            for other in running:
                os.kill(other, signal.SIGTERM)
            return code if code > 0 else 128 - code
    return 0


def run_script(arguments):
    """Run a script as the main program."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def exit_with(function, arguments):
    """Exit this process with the result of `function(arguments)`."""
    code = 1
    try:
        code = int(function(arguments))
    except SystemExit as exit_request:
        code = exit_request.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(next(filter(None, (main(int(ranks), sys.argv[2:]) for ranks in sys.argv[1].split(","))), 0))
