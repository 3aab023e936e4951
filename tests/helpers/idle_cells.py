"""Detection of cells that windows of distributed modules receive from other ranks but do not need."""

import torch

from neondist.torch.execution.runner import PlanRunner

PERTURBATIONS = (torch.nan, 1e3, -1e3)


def find_idle_cells(model, tiles):
    """Return descriptions of received lines of cells that do not change the result of a pass. Collective."""
    recorder = _PerturbingRunner(model.comm, model.plan)
    with torch.no_grad():
        recorder(tiles, *model.programs.watch.named_parameters_and_buffers())
    return recorder.idle


class _PerturbingRunner(PlanRunner):
    """Runner that overwrites received lines of cells in windows and compares the results."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._views, self._idle = {}, {}

    @property
    def idle(self):
        """Descriptions of the lines that no reader of their view needs."""
        return [
            f"line {line} along dimension {dim}, for {name}"
            for name, *sets in self._idle.values()
            for dim, line in sorted(set.intersection(*sets))
        ]

    def _run(self, step, tensors):
        for index, value in enumerate(step.inputs):
            if value in self._views and step.kind == "local" and tensors[index].numel():
                lines = set(self._lines(step, tensors, index, self._views[value]))
                self._idle[value] = (step.name, *self._idle.get(value, ())[1:], lines)
        if step.kind == "view" and step.is_window_view and step.scheme is None:
            self._views[step.outputs[0]] = step
        return super()._run(step, tensors)

    def _lines(self, step, tensors, index, view):
        padding = {dim: first for dim, first, _ in view.pads}
        pieces = [piece for incoming in self.channels[id(view)].incoming.values() for piece in incoming]
        result = step.run(*tensors)

        def is_idle(cells, perturbed):
            inputs = [*tensors[:index], perturbed, *tensors[index + 1 :]]
            return not any(_differs(step.run(*inputs), result) for _ in map(cells.fill_, PERTURBATIONS))

        needs = {request.dim: k for k, request in enumerate(self.channels[id(view)].transfer.requests)}
        for dim in range(2, tensors[index].dim()) if pieces else ():
            all_lines = range(tensors[index].shape[dim])  # of an axis that is not tiled
            for line in {
                line for piece in pieces for line in (piece.target.ranges[needs[dim]] if dim in needs else all_lines)
            }:
                perturbed = tensors[index].clone()
                if is_idle(perturbed.select(dim, line + padding.get(dim, 0)), perturbed):
                    yield dim, line


def _differs(actual, expected):
    return any(not torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
