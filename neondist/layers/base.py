"""What a model is made of: single layers, and containers of them.

A layer is a window, a forward on a view, a backward on a view; it never pads and never communicates. `layer.input`
makes the view: a PaddedArray, or a GlobalArray where the mixin `Dist` comes first among the bases.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from ..backends import Kernels
from ..errors import ConfigError
from ..geometry import Box, GridShape, Partition, Window
from ..halo import ExchangePolicy, GlobalArray, PaddedArray, as_scheme
from ..registry import Distributed, Registered, dist_class, serial_class
from .context import Context, StepContext
from .functions import Activation
from .layout import Parameter, Replicate, Shape, Shard, said_with
from .reduction import Reduction


class Node(Registered, ABC):
    """A piece of a network with one input and one output.

    Attributes
    ----------
    name : str
        Given, or made by the model from the class and a number.
    autoencodes : bool
        Whether GB trains it without targets: it has `filters`, and weights of that name.
    pools_squares : bool
        Whether its output is the root of the sum of squares over each window.
    """

    name: str | None
    autoencodes = False
    pools_squares = False

    @abstractmethod
    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the global output shape, without the batch; raises ShapeError or ConfigError if there is none."""

    @abstractmethod
    def lower(self, graph: Any, value: int) -> int:
        """Append what this node does with a value to a `plan.Graph`; return the value that it gives."""

    def chains(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield every chain inside: what is directly in it, with the shape of its input; outer chains first."""
        yield from ()

    @abstractmethod
    def give_names(self, prefix: str, counts: dict[str, int]) -> None:
        """Name what has no name: prefix, the class as a word, and a number from `counts`."""

    @abstractmethod
    def twin(self) -> Node:
        """Return the distributed twin, under the same names."""

    @property
    @abstractmethod
    def leaves(self) -> list[Layer]:
        """All single layers inside, in order."""

    def _name_itself(self, prefix: str, counts: dict[str, int]) -> None:
        if self.name is None:
            word = self._word()
            counts[word] = counts.get(word, 0) + 1
            self.name = f"{prefix}{word}{counts[word]}"

    def _word(self) -> str:
        """Return the class as a word: 'max_pooling' for MaxPoolingLayerDist."""
        word = serial_class(type(self)).__name__.removesuffix("Layer")
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", word).lower()


class LayerDescription(Node):
    """What a layer says of itself: functions of the global input shape alone, of which the plan is made.

    Attributes
    ----------
    window : Window or None
        None: every output cell sees the input cell at its own place alone.
    scheme : ExchangePolicy or None
        How cells of other tiles reach a view; None until the model says.
    layout : type
        How it has vectors: Replicate, whole on each rank of a replica, or Shard, each rank its range of the features.
        With Shard it gets such a range, and what its `forward` makes of a whole sum, feature by feature, it makes of a
        range. A class with a `forward` of its own says anew what it gives.
    """

    scheme: ExchangePolicy | None
    window: Window | None = None
    #: whether it has no use for a vector, which has no neighbours; what has a window of its own has none either
    needs_image = False
    #: True where the halo adds in fprop and is fetched in bprop
    reverse_halos = False
    layout: type[Replicate] = Replicate
    #: why the layer cannot compute cells of other tiles, if it cannot
    no_recompute = ""
    #: whether it sums over the whole image; such a layer takes its sums over `ctx.owned` cells
    sums_image = False
    #: whether, in strips and blocks, its view is what `reach_for` says, and no halo of its own travels
    sees_reach = False
    #: whether it can give ranges of outputs, of whole vectors, as of a pair of fully connected layers the first does
    can_split_outputs = False
    #: whether it does
    splits_outputs = False
    #: whether cells inside of the image differ in what is done with them
    by_place = False

    def window_for(self, input_shape: Shape) -> Window | None:
        """Return the window for inputs of this shape."""
        return self.window

    def view_window_for(self, input_shape: Shape, grid: GridShape) -> Window | None:
        """Return the window of what `forward` gets, where that is not all that an output depends on."""
        return self.window_for(input_shape)

    def reach_for(self, input_shape: Shape) -> Window | None:
        """Return the window of all that an output depends on, alike for every cell; None: there is no such window."""
        return None if self.no_recompute else self.window_for(input_shape) or Window.of_one(len(input_shape) - 1)

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
        """Return the array whose halo is fetched in bprop instead of scattering those of the input's halo."""
        if self.scheme is not None and self.scheme.gradients == "gather" and self.window_for(input_shape) is not None:
            raise ConfigError(
                "scheme: backward 'gather' needs a convolution padded with zeros; use 'auto' or 'scatter'"
            )
        return None

    def gathers_of(self, input_shape: Shape) -> tuple[Shape, Window] | None:
        """Return what `gathers_for` would if the scheme said 'gather'; None: this layer cannot."""
        return None

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return what ranks combine in a training step: at most one array before `forward`, one before `backward`."""
        return []

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return the trained arrays, by name."""
        return {}

    def state_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return the arrays that are kept but not trained, by name."""
        return {}


class Layer(LayerDescription):
    """Base of all layers. A layer of your own needs `forward` and `backward`, and a `window` if it sees neighbours.

    Attributes
    ----------
    input_shape, output_shape : tuple of int
        Global, without the batch; known after the model's build.
    ifmshape, ofmshape : tuple of int
        The same for this rank's tile.
    params, grads, state : dict of name to array
        Trained arrays, their gradients (summed over all ranks after model.bprop), and arrays that are kept but not
        trained.
    input : PaddedArray or GlobalArray
        Makes views, and offers `total`, `own`, `need` and `extent`.
    regions : pair of Partition or None
        Which cells of the input and of the output each tile has, in a segment of layers that computes some twice.
    activation : Activation or None
        Applied to what `forward` returns, unless it does that itself with `ctx.activate`.
    saves_input : bool
        False: `backward` needs nothing of the view, whose memory others may then use.
    saves_output : bool
        False: it needs nothing of the memory that `forward` returned.
    saves_activated : bool
        False: nor of that where it has applied an activation.
    saves_beside : (int, int) or None
        Bytes, and numbers, that `forward` saves beside view and outputs for each number of the outputs; None: nobody
        knows. Said where `forward` is.
    reduce_saves : bool
        False: a pass that is run again need not call `reduce` and `reduce_backward`. Said where they are.
    sums_alone : bool
        Whether `forward` looks at `ctx.reduced` alone; said there.
    absorbs : str
        Which activation behind it goes with its own pass over memory, as `ctx.activation`: one of which this field is
        true. It is said in the classes that have `forward` and `backward`.
    clears : bool
        Whether, with `ctx.clears`, no gradient of its input is where that is not positive; said where `forward` and
        `backward` are.
    in_place : bool
        Whether `backward` may write the gradient of the view over the view itself; said there.
    restores : bool
        Whether `restore` writes what `forward` gave a second time, from what that saved; said where `forward` is.
    rounds_view : bool
        Whether it looks at the view, and at gradients of outputs of other tiles, as operands of products alone, which
        have the model's precision; said where `forward` is.
    only_activates : bool
        Whether all that it does is to apply `activation`; said where `forward` is.
    gathers, scatters : GlobalArray or None
        Layers whose gradients of outputs are fetched before `input_gradient`, and layers whose windows slide over the
        output: what `forward` returns goes to those tiles that own the cells, and is added there.
    """

    has_dist_twin = True
    distributed = False
    regions: tuple[Partition | None, Partition | None] = (None, None)
    activation: Activation | None = None
    saves_input = True
    saves_output = True
    saves_activated = True
    saves_beside: tuple[int, int] | None = None
    reduce_saves = True
    sums_alone = False
    absorbs = ""
    clears = False
    in_place = False
    restores = False
    only_activates = False
    rounds_view = False
    gathers: GlobalArray | None = None
    scatters: GlobalArray | None = None

    def __init__(self, name: str | None = None, *, scheme: ExchangePolicy | str | None = None) -> None:
        self.name = name
        self.scheme = None if scheme is None else as_scheme(scheme)
        self.params: dict[str, Any] = {}
        self.grads: Any = {}
        self.state: dict[str, Any] = {}

    # What a subclass computes.

    @abstractmethod
    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return this rank's outputs (n, *out, C') for its view (n, *need, C); `ctx.save` what `backward` needs."""

    @abstractmethod
    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view, given that of the outputs; fill `ctx.grads` with this rank's share."""

    def restore(self, ctx: StepContext, y: Any) -> None:
        """Write into y what `forward` gave; asked of a layer that `restores`."""
        raise NotImplementedError

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return this rank's part of a reduction, before `forward`, which gets the result as `ctx.reduced`.

        It is declared in `reductions_for`; None, on all ranks: there is nothing to reduce in this pass.
        """

    def reduce_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the same before `backward`."""

    def finish(self, ctx: StepContext, y: Any) -> Any:
        """Return the outputs, where `scatters`, for what all tiles' windows have added up to in y."""
        return y

    def to_gather(self, ctx: StepContext, dy: Any) -> Any:
        """Return what other tiles need of the gradient of the outputs, where `gathers`."""
        return dy

    def input_gradient(self, ctx: StepContext, seen: Any) -> Any:
        """Return the gradient of the input tile, where `gathers`, given all that its windows' outputs sent."""
        raise NotImplementedError

    # What the model calls.

    def build(self, input_shape: Shape, context: Context) -> None:
        """Fix shapes and make the input, for a global input shape without the batch."""
        self.context, self.input_shape = context, tuple(input_shape)
        self.window = self.view_window_for(self.input_shape, context.grid.shape)
        self.output_shape = self.output_shape_for(self.input_shape)
        self.arrays: list[GlobalArray] = []
        self.adjust_for_dist()

    def adjust_for_dist(self) -> None:
        """Create `input` for this rank's tile, and set the local ifmshape and ofmshape."""
        self.input = self.make_array(self.input_shape, self.window)
        if self.regions != (None, None):
            self.input.cut(*self.regions)
        self.ifmshape = self.input.local_shape[1:]
        self.ofmshape = (*self.tile.shape, self.output_shape[-1])
        self.adjust_for_tile()

    def adjust_for_tile(self) -> None:
        """Make what depends on `tile`; called again for the tile of a strip or a block."""

    def make_array(self, shape: Shape, window: Window | None) -> GlobalArray:
        """Return what makes the views of activations of this global shape (without the batch), and count its bytes."""
        array = self.new_array((self.context.batch_size, *shape), window)
        array.policy = self.scheme or array.policy
        self.arrays.append(array)
        return array

    def new_array(self, shape: Shape, window: Window | None) -> GlobalArray:
        """Return a PaddedArray; the mixin `Dist` returns a GlobalArray."""
        return PaddedArray(shape, window, str(self.context.dtype), backend=self.context.backend, reuse=True)

    def settle(self) -> None:
        """Wait for messages that a scheme has left under way; collective."""
        for array in self.arrays:
            array.settle()

    def lower(self, graph: Any, value: int) -> int:
        """Append this layer to the graph."""
        found: int = graph.layer(self, value)
        return found

    def give_names(self, prefix: str, counts: dict[str, int]) -> None:
        """Name this layer, if it has no name."""
        self._name_itself(prefix, counts)
        self._check_form()

    def _check_form(self) -> None:
        """Raise ConfigError for a layer as neondist 0.1 wanted it."""
        for method in (self.forward, self.backward):
            if len(inspect.signature(method).parameters) < 2:
                raise ConfigError(
                    f"layer '{self.name}': {type(self).__name__}.{method.__name__} takes one array, as in neondist"
                    " 0.1; write forward(self, ctx, view) and backward(self, ctx, dy), and keep what backward"
                    " needs with"
                    " ctx.save(name=array) instead of on self (docs/adding_a_layer.md)"
                )

    def twin(self) -> Layer:
        """Return a new layer of the distributed class, with the same arguments and name."""
        found: Layer = dist_class(type(self))(**self.arguments() | {"name": self.name})
        return found

    @property
    def leaves(self) -> list[Layer]:
        """This layer."""
        return [self]

    def can_absorb(self, activation: Activation) -> bool:
        """Tell whether it applies this activation, of a layer behind it, in its own pass over memory."""
        said = [said_with(self, "absorbs", method) for method in ("forward", "backward")]
        fits = said == [self.absorbs] * 2 and self.activation is None and self.absorbs
        return bool(fits and said_with(activation, self.absorbs, "fprop"))

    @property
    def bytes_sent(self) -> int:
        """Bytes of halos that this rank has sent for this layer."""
        return sum(array.bytes_sent for array in self.arrays)

    @property
    def gives_shards(self) -> bool:
        """Whether its sum may stay cut over the tiles' ranks, where it is a vector."""
        each = self.activation is None or said_with(self.activation, "elementwise", "fprop")
        return bool(each) and said_with(self, "layout", "forward") is Shard

    @property
    def keeps_output(self) -> bool:
        """Whether what it returned has to stay as it is until the way back."""
        return self.saves_output or self.activation is not None

    @property
    def tile(self) -> Box:
        """The cells of the output that this rank computes."""
        grid, outputs = self.context.grid, self.regions[1]
        return grid.tile_box(self.output_shape[:-1]) if outputs is None else outputs.box(grid.tile)

    @property
    def kernels(self) -> Kernels:
        """The backend's kernels."""
        return self.context.backend.kernels


class Dist(Distributed):
    """The mixin that distributes a layer: `class MyLayerDist(Dist, MyLayer)`; its input is cut into tiles."""

    distributed = True
    context: Context

    def new_array(self, shape: Shape, window: Window | None) -> GlobalArray:
        """Return a GlobalArray over the model's grid."""
        context = self.context
        return GlobalArray(context.grid, shape, window, dtype=str(context.dtype), backend=context.backend, reuse=True)
