"""Parameter servers and a master in this process, over real gRPC."""

import contextlib

import numpy as np

from neondist.services.client import ParameterClient
from neondist.services.group import ServerConnections
from neondist.services.master import Master
from neondist.services.placement import place_parameters
from neondist.services.recovery import ServerRecovery
from neondist.services.server import ParameterServer
from neondist.services.wire import ServiceHost, create_token
from neondist.strategies import ParameterSpec, as_builder

SHAPES = {"conv/weights": (3, 3, 2, 4), "conv/bias": (4,), "fc/weights": (10, 6), "fc/bias": (6,), "scale": ()}


def draw_arrays(seed, shapes=None, dtype="float64"):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape), dtype) for name, shape in (shapes or SHAPES).items()}


class Servers:
    """Parameter servers and a master, with a factory of clients; `recover`: with checkpoints, as in a job."""

    def __init__(self, count, folder=None, minibatches_per_task=1, recover=False, server_class=ParameterServer):
        self.token, self.stack = create_token(), contextlib.ExitStack()
        self.servers = [server_class(folder) for _ in range(count)]
        self.hosts = [
            self.stack.enter_context(ServiceHost([server], "127.0.0.1:0", self.token)) for server in self.servers
        ]
        self.master = Master(minibatches_per_task, path=folder / "tasks.sqlite" if recover else None)
        self.master_host = self.stack.enter_context(ServiceHost([self.master], "127.0.0.1:0", self.token))
        if recover:
            connections = ServerConnections([host.address for host in self.hosts], self.token)
            self.stack.callback(self.master.close)
            self.stack.enter_context(connections)
            self.stack.enter_context(ServerRecovery(connections, folder, self.master))

    def layouts(self, strategy="PSLoadBalancing", shapes=None, tables=(), dtype="float64", sparse=()):
        shapes = SHAPES if shapes is None else shapes
        specs = [ParameterSpec(name, shape, dtype, name in sparse) for name, shape in shapes.items()]
        count = len(self.servers)
        return place_parameters(as_builder(strategy).build(specs, count), count, tables)

    def client(self, worker="0", layouts=None, **arguments):
        addresses = [host.address for host in self.hosts]
        client = ParameterClient(addresses, layouts or self.layouts(), self.token, worker, retry_seconds=1, **arguments)
        return self.stack.enter_context(client)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()
