"""Hostile messages to a parameter server: python tools/hostile_messages.py [--count 10000] [--seed S].

The exit code is 1 unless all malformed ones are refused, nothing has changed, and the server still answers.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from parameter_servers import Servers
from random_messages import METHODS, check_hostile_requests, send


def main() -> int:
    """Send them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    each = -(-given.count // len(METHODS))
    with Servers(1) as job:
        address = job.hosts[0].address
        refused = sum(send(address, f"/neondist.PServer/{name}", job.token, each, given.seed) for name in METHODS)
        alive = not job.client("0").status()[0]["initialized"]
    print(f"{refused} of {each * len(METHODS)} malformed messages refused; the server answers: {alive}")
    requests = check_hostile_requests(given.count, given.seed)
    print(f"{requests} of {given.count} well-formed requests with wrong content refused; values as before")
    return 0 if refused == each * len(METHODS) and alive else 1


if __name__ == "__main__":
    sys.exit(main())
