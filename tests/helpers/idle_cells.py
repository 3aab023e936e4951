"""Cells that windows of distributed modules receive from other ranks and do not need."""

import torch

from neondist.torch.execution.run import Runner

FILLS = (torch.nan, 1e3, -1e3)


def idle_cells(model, tiles):
    """Return as text which steps of a pass receive lines of cells that change no result; collective."""
    runner = _Sentinel(model.comm, model.plan)
    with torch.no_grad():
        runner(tiles, *model._watch.tensors())
    return runner.idle


class _Sentinel(Runner):
    """A runner that writes other numbers over lines of what windows see, of which cells have come from others."""

    def __init__(self, *what):
        super().__init__(*what)
        self._views, self._idle = {}, {}

    @property
    def idle(self):
        """Lines that no step needs of those that read the view, as text."""
        return [
            f"line {line} along dimension {dim}, for {name}"
            for name, *each in self._idle.values()
            for dim, line in sorted(set.intersection(*each))
        ]

    def _run(self, step, tensors):
        for at, value in enumerate(step.inputs):
            if value in self._views and step.kind == "local" and tensors[at].numel():
                found = set(self._lines(step, tensors, at, self._views[value]))
                self._idle[value] = (step.name, *self._idle.get(value, ())[1:], found)
        if step.kind == "view" and step.window and step.scheme is None:
            self._views[step.outputs[0]] = step
        return super()._run(step, tensors)

    def _lines(self, step, tensors, at, view):
        before = {dim: first for dim, first, _ in view.pads}
        pieces = [piece for arriving in self.channels[id(view)].arriving.values() for piece in arriving]
        result = step.run(*tensors)

        def is_idle(cells, other):
            given = [*tensors[:at], other, *tensors[at + 1 :]]
            return not any(_differ(step.run(*given), result) for _ in map(cells.fill_, FILLS))

        wants = {want.dim: k for k, want in enumerate(self.channels[id(view)].transfer.wants)}
        for dim in range(2, tensors[at].dim()) if pieces else ():
            every = range(tensors[at].shape[dim])  # of what is not cut
            for line in {line for piece in pieces for line in (piece.target[wants[dim]] if dim in wants else every)}:
                other = tensors[at].clone()
                if is_idle(other.select(dim, line + before.get(dim, 0)), other):
                    yield dim, line


def _differ(found, result):
    return any(not torch.equal(a, b) for a, b in zip(found, result, strict=True))
