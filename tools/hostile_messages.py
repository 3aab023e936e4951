"""Fuzz test of a parameter server with invalid messages: python tools/hostile_messages.py [--count 10000] [--seed S].

The exit code is 1 unless all malformed messages are rejected, nothing has changed, and the server still responds.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from parameter_servers import Servers
from random_messages import SERVER_METHODS, check_hostile_requests, send_messages


def main() -> int:
    """Send the messages, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    count = -(-arguments.count // len(SERVER_METHODS))
    with Servers(1) as job:
        address = job.hosts[0].address
        refused = sum(
            send_messages(address, f"/neondist.PServer/{name}", job.token, count, arguments.seed)
            for name in SERVER_METHODS
        )
        alive = not job.client("0").status()[0]["initialized"]
    print(f"{refused} of {count * len(SERVER_METHODS)} malformed messages rejected; the server still responds: {alive}")
    requests = check_hostile_requests(arguments.count, arguments.seed)
    print(f"{requests} of {arguments.count} well-formed requests with invalid content rejected; values unchanged")
    return 0 if refused == count * len(SERVER_METHODS) and alive else 1


if __name__ == "__main__":
    sys.exit(main())
