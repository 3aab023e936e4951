"""Benchmark of local parameter servers: python tools/bench_servers.py [--megabytes 100] [--servers 2] [--rounds 7].

Compares a push and a pull of all parameters with sending the same number of bytes over plain sockets to the same number
of processes, and an update on a server with the same optimiser in process. Prints a table of the best of several
interleaved rounds.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import neondist as nd
from neondist.services.client import ParameterClient
from neondist.services.placement import place_parameters
from neondist.services.state import PushedGradient, ServerState, SyncPolicy
from neondist.services.updates import describe_optimizer
from neondist.services.wire import TOKEN_VARIABLE, create_token
from neondist.strategies import ParameterSpec, PSLoadBalancing

PEER_SCRIPT = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0)); print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
size = int(sys.argv[1]); buffer = bytearray(size); values = bytes(size)
while True:
    view = memoryview(buffer)
    while view:
        got = connection.recv_into(view)
        if not got: sys.exit()
        view = view[got:]
    connection.sendall(values)
"""


class Sockets:
    """Peers that each receive a number of bytes and send the same number back."""

    def __init__(self, count, size):
        command = [sys.executable, "-c", PEER_SCRIPT, str(size)]
        self.peers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
        self.sockets = [socket.create_connection(("127.0.0.1", int(peer.stdout.readline()))) for peer in self.peers]
        self.values, self.threads = bytes(size), ThreadPoolExecutor(count)

    def exchange(self):
        """Send all bytes to each peer, and receive the same number."""
        list(self.threads.map(self._exchange_with, self.sockets))

    def _exchange_with(self, connection):
        connection.sendall(self.values)
        view = memoryview(bytearray(len(self.values)))
        while view:
            view = view[connection.recv_into(view) :]

    def close(self):
        """End the peers."""
        for connection, peer in zip(self.sockets, self.peers, strict=True):
            connection.close()
            peer.wait()
            peer.stdout.close()


def measure(functions, rounds):
    """Return the shortest time of each function in seconds; rounds are interleaved."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def measure_traffic(megabytes, servers, rounds):
    """Return the size in bytes, and the shortest seconds with plain sockets and with servers."""
    shapes = [(1000, 250)] * megabytes
    specs = [ParameterSpec(f"layer{index}/weights", shape) for index, shape in enumerate(shapes)]
    values = {spec.name: np.zeros(spec.shape, "float32") for spec in specs}
    size = sum(value.nbytes for value in values.values())
    token, sockets = create_token(), Sockets(servers, size // servers)
    command = [sys.executable, "-m", "neondist", "serve", "ps"]
    processes = [
        subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: token}, stdout=subprocess.PIPE, text=True)
        for _ in range(servers)
    ]
    addresses = [process.stdout.readline().split()[-1] for process in processes]
    layouts = place_parameters(PSLoadBalancing().build(specs, servers), servers)
    with ParameterClient(addresses, layouts, token, "0") as client:
        client.push_initial_values(values, nd.SGD(0.0), SyncPolicy(sync=False))
        client.pull(values)

        def exchange():
            client.push(values)
            client.pull(values)

        seconds = measure([sockets.exchange, exchange], rounds)
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
    sockets.close()
    return size, seconds


def measure_updates(optimizer, megabytes, rounds):
    """Return the shortest seconds of an update in process and of an update on a server."""
    size = megabytes * 250_000
    layout = place_parameters(PSLoadBalancing().build([ParameterSpec("weights", (size // 1000, 1000))], 1), 1)[0]
    state = ServerState(layout.to_json(), describe_optimizer(optimizer))
    values, gradient = np.zeros(size, "float32"), np.full(size, 1e-3, "float32")
    slots, pushed = optimizer.create_slots(values), gradient.copy()

    def update_in_process():
        optimizer.update(values, gradient, slots, 1)

    def update_on_server():
        state.apply_gradients([PushedGradient("0", "0", 0, 0, 1.0, 1.0, None, {"float32": pushed}, {})])

    update_on_server()  # creates the slots
    return measure([update_in_process, update_on_server], rounds)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    size, (plain, served) = measure_traffic(arguments.megabytes, arguments.servers, arguments.rounds)
    print(f"push and pull of {size / 1e6:.0f} MB, {arguments.servers} servers:")
    print(f"  plain sockets {plain * 1e3:.0f} ms ({2 * size / plain / 1e9:.2f} GB/s)")
    print(f"  servers {served * 1e3:.0f} ms ({2 * size / served / 1e9:.2f} GB/s): {plain / served:.2f}")
    for optimizer in (nd.SGD(0.1), nd.SGD(0.1, momentum=0.9), nd.Adam(0.1)):
        local, remote = measure_updates(optimizer, arguments.megabytes, arguments.rounds)
        name = type(optimizer).__name__ + (" with momentum" if optimizer.slot_names == ("momentum",) else "")
        print(f"update of {arguments.megabytes} MB, {name}:")
        print(f"  in process {local * 1e3:.0f} ms, on a server {remote * 1e3:.0f} ms: {remote / local:.2f}")


if __name__ == "__main__":
    main()
