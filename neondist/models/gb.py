"""The sparse autoencoder of Le et al. (2012)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from ..arrays.precision import PrecisionName
from ..backends import Backend
from ..comm import ProcessGrid
from ..costs import Cost
from ..errors import ConfigError
from ..geometry import GridShape
from ..halo import ExchangePolicy
from ..layers import Node
from ..optim import Adam, Optimizer
from ..parallel import TrainedSubset
from ..plan import Plan
from ..registry.ranges import Count, Index, NotNegative, Positive
from ..strategies import Strategy, StrategyBuilder
from .autoencoder import Autoencoder, pretraining_elements_sent_per_sample
from .convnet import Convnet
from .reconstruction import ReconstructionCost


class GB(Convnet):
    """Stages of unshared filters, L2 pooling and contrast normalisation, pretrained without labels, and an FC head.

    A stage begins with a LocalFilteringLayer, usually followed by an L2PoolingLayer and an LCNLayer (Le et al. 2012,
    "Building high-level features using large scale unsupervised learning", ICML). `nd.pretrain`, which an experiment
    calls first, trains the stages greedily, each on the output of the previous stages. With the stage's filters W
    applied to windows of the input, the cost of a sample x is::

        1/2 |x - Wᵀ(W x)|² + sparsity · Σ sqrt(epsilon + pooled squares of W x)

    The decoder is the encoder's transpose (tied weights); a cell of the reconstruction is the sum over all windows that
    contain it, including those of other ranks' tiles. The second sum is over the windows of the L2 pooling layer, or
    over the filters' outputs if there is none. The layer's bias and activation are not used.

    Supervised training first updates only the head, from the first trained layer after the last stage onwards, for
    `num_initial_epochs`, and then all layers.

    Parameters
    ----------
    layers, cost, optimizer, seed, backend, dtype, precision, scheme, accumulate, sync, recompute, strategy
        As in Model.
    num_pretrain_epochs : int
        Epochs per stage; 0 keeps the initial weights.
    num_initial_epochs : int
        Number of supervised epochs that train only the head.
    sparsity, epsilon : float
        Weight of the sparsity term, at least 0, and the constant under the root, above 0.
    orthonormal : bool
        After each pretraining step, make the filters of each cell orthonormal up to a common scale.
    pretrain_optimizer : Optimizer, optional
        Optimiser of pretraining. Default: Adam.

    Attributes
    ----------
    stages : list of Autoencoder
        Autoencoders of the stages, available after `build`.
    """

    strips_blocker = "trains its stages one by one"

    def __init__(
        self,
        layers: Sequence[Node | Sequence[Any]],
        *,
        cost: Cost | None = None,
        optimizer: Optimizer | None = None,
        seed: Index = 0,
        backend: str | Backend = "auto",
        dtype: str = "float32",
        precision: PrecisionName = "float32",
        num_pretrain_epochs: Index = 1,
        num_initial_epochs: Index = 1,
        sparsity: NotNegative = 0.1,
        epsilon: Positive = 1e-2,
        orthonormal: bool = False,
        pretrain_optimizer: Optimizer | None = None,
        accumulate: Count = 1,
        sync: Literal["allreduce", "bucketed"] = "allreduce",
        recompute: bool = False,
        scheme: ExchangePolicy | str = "halo",
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        super().__init__(
            layers,
            cost=cost,
            optimizer=optimizer,
            seed=seed,
            backend=backend,
            dtype=dtype,
            precision=precision,
            scheme=scheme,
            accumulate=accumulate,
            sync=sync,
            recompute=recompute,
            strategy=strategy,
        )
        self.num_pretrain_epochs, self.num_initial_epochs = num_pretrain_epochs, num_initial_epochs
        self.sparsity, self.epsilon, self.orthonormal = sparsity, epsilon, orthonormal
        self.pretrain_optimizer = pretrain_optimizer or Adam()
        self._arguments |= {"pretrain_optimizer": self.pretrain_optimizer}
        self.stage_starts = [index for index, layer in enumerate(self.layers) if layer.is_pretrained_as_autoencoder]
        if not self.stage_starts:
            class_name = type(self).__name__
            raise ConfigError(
                f"layers: {class_name} pretrains LocalFiltering layers, but there are none; add one, or use Convnet"
            )

    @property
    def pretraining_arguments(self) -> dict[str, Any]:
        """Constructor arguments that determine the pretraining, by name."""
        names = ("num_pretrain_epochs", "num_initial_epochs", "sparsity", "epsilon", "orthonormal")
        return {name: getattr(self, name) for name in (*names, "pretrain_optimizer")}

    def build(
        self, input_shape: Sequence[int], batch_size: int, grid: ProcessGrid | None = None, plan: Plan | None = None
    ) -> None:
        """Build the layers as Model does, then the autoencoders."""
        super().build(input_shape, batch_size, grid, plan)
        later_indices = range(self.stage_starts[-1] + 1, len(self.layers))
        trained_indices = (i for i in later_indices if any(leaf.params for leaf in self.layers[i].leaves))
        self.first_head_index = next(trained_indices, len(self.layers))
        cost = ReconstructionCost(self.sparsity, self.epsilon)
        self.stages = [
            Autoencoder(self, number, range(*bounds), cost, self.pretrain_optimizer, self.orthonormal)
            for number, bounds in enumerate(pairwise([*self.stage_starts, self.first_head_index]), start=1)
        ]
        head_leaves = [leaf for layer in self.layers[self.first_head_index :] for leaf in layer.leaves]
        self.head_parameters = TrainedSubset(self.built_parameters, head_leaves, self.first_head_index)
        self.trains_head_only = False

    def plan(self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None) -> Plan:
        """Return the plan, pretraining included."""
        plan = super().plan(input_shape, grid, batch_size)
        for index in self.stage_starts if self.num_pretrain_epochs else ():
            name = str(self.layers[index].name)
            is_pooled = any(layer.pools_squares for layer in self.layers[index + 1 : index + 2])
            planned_index = [layer.name for layer in plan].index(name)
            plan.pretraining_elements_sent[name] = pretraining_elements_sent_per_sample(plan, planned_index, is_pooled)
        return plan

    def begin_epoch(self, epoch: int, samples_seen: int = 0) -> None:
        """Select the layers that the epoch trains; the optimiser is reset when they change."""
        self.trains_head_only = epoch < self.num_initial_epochs
        self.trained_parameters = self.head_parameters if self.trains_head_only else self.built_parameters
        if not samples_seen and epoch == self.num_initial_epochs > 0:
            self.steps_without_optimizer = self.step
            for slot in self.slots.values():
                slot[...] = 0
