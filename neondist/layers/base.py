"""A layer is a window, a forward on a view, a backward on a view; it never pads and never communicates.

`layer.input` makes the view: a PaddedArray, or a GlobalArray where the mixin `Dist` comes first among the bases.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ..arrays import GlobalArray, PaddedArray
from ..backends import Backend
from ..errors import ConfigError
from ..geometry import Box, GridShape, Partition, Window
from ..initializers import Constant, Initializer
from ..registry import Distributed, dist_class
from ..schemes import Scheme, as_scheme
from .functions import Activation
from .node import Context, Node, Phase, Shape, Taker
from .sums import LayerSum


@dataclass(frozen=True)
class Parameter:
    """Shape and first values of one array of a layer.

    With `tiled`, its leading axes are the output's spatial axes, and each rank keeps the part of its own output tile
    alone (unshared weights): the gradient is then summed over the replicas, not over the tiles.
    """

    shape: Shape
    initializer: Initializer = field(default_factory=Constant)
    fan_in: int = 1
    fan_out: int = 1
    tiled: bool = False

    def size_on(self, tile: Box) -> int:
        """Return how many of its numbers the rank of an output tile keeps."""
        return tile.size * prod(self.shape[tile.ndim :]) if self.tiled else prod(self.shape)


class Layer(Node):
    """Base of all layers. A layer of your own needs `forward` and `backward`, and a `window` if it sees neighbours.

    Attributes
    ----------
    window : Window or None
        None: every output cell sees the input cell at its own place alone.
    input_shape, output_shape : tuple of int
        Global, without the batch; known after the model's build.
    ifmshape, ofmshape : tuple of int
        The same for this rank's tile.
    params, grads, state : dict of name to array
        Trained arrays, their gradients (summed over all ranks after model.bprop), and arrays that are kept but not
        trained.
    input : PaddedArray or GlobalArray
        Makes views, and offers `total`, `own`, `need` and `extent`.
    phase : Phase
        What the pass at work is for.
    scheme : Scheme or None
        How cells of other tiles reach a view; None until the model says.
    regions : pair of Partition or None
        Which cells of the input and of the output each tile has, in a run of layers that computes some twice.
    direct : bool
        True: `forward` applies the activation itself and writes into `new_output`, and `backward` undoes it and writes
        into `new_dview`. It holds for the methods of the class that says so; a subclass with a `forward` or `backward`
        of its own gets the safe way: its results are copied, and the activation is applied to them.
    keeps_view : bool
        False: neither what `forward` returns nor what `backward` needs is memory of the view, which others may then
        use. It holds as `direct` does.
    """

    has_dist_twin = True
    distributed = False
    window: Window | None = None
    #: whether it has no use for a vector, which has no neighbours; what has a window of its own has none either
    needs_image = False
    #: True where the halo adds in fprop and is fetched in bprop
    reverse_halos = False
    #: why the layer cannot compute cells of other tiles, if it cannot
    no_recompute = ""
    #: whether it sums over the whole image; such a layer takes its sums over `counted` cells
    sums_image = False
    regions: tuple[Partition | None, Partition | None] = (None, None)
    activation: Activation | None = None
    direct = False
    keeps_view = True
    preceding: Node | None = None
    following: Taker | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take back what a base class said of a `forward` or `backward` that this class replaces."""
        super().__init_subclass__(**kwargs)
        written = min(_first(cls, method) for method in ("forward", "backward", "fprop", "bprop"))
        for name, safe in (("direct", False), ("keeps_view", True)):
            if written < _first(cls, name):
                setattr(cls, name, safe)

    def __init__(self, name: str | None = None, scheme: Scheme | str | None = None) -> None:
        self.name = name
        self.scheme = None if scheme is None else as_scheme(scheme)
        self.params: dict[str, Any] = {}
        self.grads: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.phase = Phase()

    # What a subclass may say of itself: functions of the global input shape alone.

    def window_for(self, input_shape: Shape) -> Window | None:
        """Return the window for inputs of this shape."""
        return self.window

    def channels_for(self, input_shape: Shape) -> int:
        """Return the number of output channels."""
        return input_shape[-1]

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the global output shape, without the batch; raises ShapeError or ConfigError if there is none."""
        window = self.window_for(input_shape)
        extent = input_shape[:-1]
        if window is not None:
            window.check(extent)
            extent = window.output_extent(extent)
        return *extent, self.channels_for(input_shape)

    def halos_for(self, input_shape: Shape, grid: GridShape) -> list[tuple[Shape, Window]]:
        """Return the arrays whose halos travel in a step: global shape without the batch, and window."""
        window = self.window_for(input_shape)
        return [] if window is None else [(input_shape, window)]

    def gathers_for(self, input_shape: Shape, grid: GridShape) -> tuple[Shape, Window] | None:
        """Return the array whose halo is fetched in bprop instead of sending gradients of the input's halo home."""
        if self.scheme is not None and self.scheme.way_back == "gather" and self.window_for(input_shape) is not None:
            raise ConfigError(
                "scheme: backward 'gather' needs a convolution padded with zeros; use 'auto' or 'scatter'"
            )
        return None

    def gathers_of(self, input_shape: Shape) -> tuple[Shape, Window] | None:
        """Return what `gathers_for` would if the scheme said 'gather'; None: this layer cannot."""
        return None

    def sums_for(self, input_shape: Shape) -> list[LayerSum]:
        """Return what is summed over ranks in a training step, the gradients of the weights not counted."""
        return []

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return the trained arrays, by name."""
        return {}

    def state_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return the arrays that are kept but not trained, by name."""
        return {}

    # What a subclass computes.

    @abstractmethod
    def forward(self, view: Any) -> Any:
        """Return this rank's outputs (n, *out, C') for its view (n, *need, C); keep what `backward` needs."""

    @abstractmethod
    def backward(self, dy: Any) -> Any:
        """Return the gradient of the view, given that of the outputs; fill `grads` with this rank's share."""

    # What the model calls.

    def build(self, input_shape: Shape, context: Context) -> None:
        """Fix shapes and make the input, for a global input shape without the batch."""
        self.context, self.input_shape = context, tuple(input_shape)
        self.window = self.window_for(self.input_shape)
        self.output_shape = self.output_shape_for(self.input_shape)
        self.arrays: list[PaddedArray] = []
        self.adjust_for_dist()

    def connect(self, preceding: Node | None, following: Taker | None) -> None:
        """Remember the neighbours."""
        self.preceding, self.following = preceding, following

    def input_place(self, samples: int) -> Any:
        """Return the middle of the view."""
        return self.input.place(samples)

    def adjust_for_dist(self) -> None:
        """Create `input` for this rank's tile, and set the local ifmshape and ofmshape."""
        self.input = self.make_array(self.input_shape, self.window)
        if self.regions != (None, None):
            self.input.cut(*self.regions)
        self.ifmshape = self.input.local_shape[1:]
        self.ofmshape = (*self.tile.shape, self.output_shape[-1])

    def make_array(self, shape: Shape, window: Window | None) -> PaddedArray:
        """Return what makes the views of activations of this global shape (without the batch), and count its bytes."""
        array = self.new_array((self.context.batch_size, *shape), window)
        array.border.scheme = self.scheme or array.border.scheme
        self.arrays.append(array)
        return array

    def new_array(self, shape: Shape, window: Window | None) -> PaddedArray:
        """Return a PaddedArray; the mixin `Dist` returns a GlobalArray."""
        return PaddedArray(shape, window, str(self.context.dtype), self.context.backend, reuse=True)

    def fprop(self, x: Any, phase: Phase) -> Any:
        """Return this rank's tile of the output for its tile of the input."""
        self._enter(phase)
        view = self.input.get_fprop_view(x)
        y = self.forward(view)
        if self.activation is not None:
            if not self.direct:  # what the activation overwrites must not be the input of others
                y = self.activation.fprop(y.copy() if np.may_share_memory(y, view) else y)
            self.output = y
        return y

    def bprop(self, dy: Any) -> Any:
        """Return the gradient of this rank's tile of the input, given that of the output."""
        self.input.reductions.direction = "backward"
        if self.activation is not None and not self.direct:
            dy = self.activation.bprop(self.output, dy)
        dview = self.backward(dy)
        return self.send_home(dview) if self.needs_input_gradient else None

    def send_home(self, dview: Any) -> Any:
        """Return the gradient of this rank's tile, given that of its view."""
        return self.input.get_bprop_view(dview)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.input.reductions.direction = phase, "forward"
        for array in self.arrays:
            array.border.phase = phase

    def settle(self) -> None:
        """Wait for messages that a scheme has left under way; collective."""
        for array in self.arrays:
            array.border.settle()

    def walk(self, input_shape: Shape) -> Iterator[tuple[Layer, Shape]]:
        """Yield this layer."""
        yield self, input_shape

    def chains(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield nothing."""
        yield from ()

    def give_names(self, prefix: str, counts: dict[str, int]) -> None:
        """Name this layer, if it has no name."""
        self._name_itself(prefix, counts)

    def twin(self) -> Layer:
        """Return a new layer of the distributed class, with the same arguments and name."""
        found: Layer = dist_class(type(self))(**self.arguments() | {"name": self.name})
        return found

    @property
    def first_leaves(self) -> list[Layer]:
        """This layer."""
        return [self]

    @property
    def leaves(self) -> list[Layer]:
        """This layer."""
        return [self]

    @property
    def bytes_sent(self) -> int:
        """Bytes of halos that this rank has sent for this layer."""
        return sum(array.bytes_sent for array in self.arrays)

    # What `forward` and `backward` may use.

    @property
    def tile(self) -> Box:
        """The cells of the output that this rank computes."""
        grid, outputs = self.context.grid, self.regions[1]
        return grid.tile_box(self.output_shape[:-1]) if outputs is None else outputs.box(grid.tile)

    def counted(self, array: Any) -> Any:
        """Return the part of an array over this rank's input cells that no other rank has too."""
        if self.regions[0] is None:
            return array
        own = self.context.grid.tile_box(self.input_shape[:-1]).relative_to(self.input.own)
        return array[(slice(None), *own.slices)]

    @property
    def kernels(self) -> Backend:
        """The backend's kernels."""
        return self.context.backend

    def new_output(self, samples: int) -> Any:
        """Return an array (samples, *ofmshape) to write the outputs to: where the next layer wants them, if it does."""
        wanted = self.following.input_place(samples) if self.direct and self.following else None
        return np.empty((samples, *self.ofmshape), self.context.dtype) if wanted is None else wanted

    def new_dview(self, samples: int) -> Any:
        """Return an array (samples, *view) to write the gradient of the view to."""
        wanted = self.input.dview_place(samples) if self.direct else None
        shape = self.input.view_shape[1:]
        return np.empty((samples, *shape), self.context.dtype) if wanted is None else wanted

    def write_activated(self, z: Any, y: Any) -> None:
        """Write the activation of z, a part of the outputs that may be overwritten, into y; for direct layers."""
        if self.activation is None or not self.direct:
            self.kernels.copy(z, y)
        else:
            self.activation.finish(z, y, self.kernels)

    def before_activation(self, dy: Any, part: tuple) -> Any:
        """Return the gradient of z of `write_activated`, contiguous, for a part (an index) of the outputs."""
        if self.activation is None or not self.direct:
            return np.ascontiguousarray(dy[part])
        return self.activation.begin(self.output[part], dy[part], self.kernels)

    def total(self, array: Any, replicas: bool = False) -> Any:
        """Return the sum over all tiles (and replicas) of what each rank counted over its own cells."""
        return self.input.total(array, replicas)

    def share(self, array: Any) -> Any:
        """Return this rank's share in a sum over all ranks of something computed from the output.

        Outputs with no spatial axes are known whole on every tile's rank, and must be counted once.
        """
        counted = self.output_shape[:-1] or self.context.grid.tile == 0
        return array if counted else 0 * array


def _first(cls: type, name: str) -> int:
    """Return how far up the line of its bases a class finds an attribute."""
    return next(at for at, base in enumerate(cls.__mro__) if name in vars(base))


class Dist(Distributed):
    """The mixin that distributes a layer: `class MyLayerDist(Dist, MyLayer)`; its input is cut into tiles."""

    distributed = True
    context: Context

    def new_array(self, shape: Shape, window: Window | None) -> PaddedArray:
        """Return a GlobalArray over the model's grid."""
        context = self.context
        return GlobalArray(context.grid, shape, window, str(context.dtype), context.backend, reuse=True)
