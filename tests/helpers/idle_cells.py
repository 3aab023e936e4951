"""Cells that windows of distributed modules receive from other ranks and do not need."""

import torch

from neondist.torch.run import Runner

FILLS = (torch.nan, 1e3, -1e3)


def idle_cells(model, tiles):
    """Return as text which steps of a pass receive lines of cells that change no result; collective."""
    runner = _Sentinel(model.wires, model.plan)
    with torch.no_grad():
        runner(tiles, *model._watch.tensors())
    return runner.idle


class _Sentinel(Runner):
    """A runner that writes other numbers over the first and the last line of what windows see.

    A view is a range along each axis, from the first cell that windows span to the last: of some between, and of some
    at the border of the image, dilated windows see nothing.
    """

    def __init__(self, *what):
        super().__init__(*what)
        self.idle, self._views = [], {}

    def _run(self, step, tensors):
        for at, value in enumerate(step.inputs):
            if value in self._views and step.kind == "local" and tensors[at].numel():
                self._look(step, tensors, at, self._views[value])
        if step.kind == "view" and step.window and step.scheme is None:
            self._views[step.outputs[0]] = step
        return super()._run(step, tensors)

    def _look(self, step, tensors, at, view):
        padded = {dim: ends for dim, *ends in view.pads}
        pieces = [piece for arriving in self.channels[id(view)].arriving.values() for piece in arriving]
        result = step.run(*tensors)

        def is_idle(cells, other):
            given = [*tensors[:at], other, *tensors[at + 1 :]]
            return not any(_differ(step.run(*given), result) for _ in map(cells.fill_, FILLS))

        if is_idle(whole := tensors[at].clone(), whole):  # dilated windows may see no cell of a small image
            return
        for k, want in enumerate(self.channels[id(view)].transfer.wants):
            last, (before, after) = want.extent(self.wires.place) - 1, padded.get(want.dim, (0, 0))
            for line in {*([] if before else [0]), *([] if after else [last])}:
                if not any(piece.target[k][0] <= line < piece.target[k][1] for piece in pieces):
                    continue
                other = tensors[at].clone()
                if is_idle(other.select(want.dim, line + before), other):
                    self.idle.append(f"line {line} of {last + 1} along dimension {want.dim}, for {step.name}")


def _differ(found, result):
    return any(not torch.equal(a, b) for a, b in zip(found, result, strict=True))
