"""A script's training steps of a distributed module, as hooks and checkpoints see a model."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..io.checkpoint import from_plain, to_plain
from ..io.checkpoint.texts import of_kind, whole
from ..layers import Parameter
from ..models import ScriptModel
from ..parallel import ParameterShard, SyncState
from .distributed_optimizer import DistributedOptimizer
from .module import DistributedModule
from .parameters import MODULE
from .weights import as_array, begin_slots, kept_tensors, slots_of


class ModuleScript(ScriptModel):
    """A distributed module, its optimiser, and PyTorch's random numbers.

    Parameters
    ----------
    module : DistributedModule
    optimizer : torch.optim.Optimizer, optional
        Of its parameters: a DistributedOptimizer, or one that every rank has whole. None: nothing is trained.
    """

    def __init__(self, module: DistributedModule, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(module.grid)
        self.module, self.optimizer = module, optimizer
        self.counted: DistributedModule | ScriptModel = module
        self.divided = optimizer.parameters if isinstance(optimizer, DistributedOptimizer) else None
        if self.divided is not None:
            self.sync = self.divided.sync
        self.dtype = as_array(next(iter(module.parameters()), torch.zeros(()))).dtype

    @classmethod
    def of(cls, parts: Iterable[Any]) -> tuple[ModuleScript | None, list[Any]]:
        """Return the script of a distributed module and its optimiser, and the other parts; None: there is none.

        Raises
        ------
        ConfigError
            There are several modules or optimisers, an optimiser without a module, or a module that is not distributed.
        """
        rest, modules, optimizers = [], list[DistributedModule](), list[torch.optim.Optimizer]()
        for part in parts:
            if isinstance(part, DistributedModule):
                modules.append(part)
            elif isinstance(part, torch.optim.Optimizer):
                optimizers.append(part)
                modules += [part.module] if isinstance(part, DistributedOptimizer) else []
            elif isinstance(part, nn.Module):
                raise ConfigError(
                    f"model: {type(part).__name__} is not distributed; give the result of ndt.distribute(module,"
                    " example_shape)"
                )
            else:
                rest.append(part)
        modules = list({id(module): module for module in modules}.values())
        optimizers = optimizers or [module.optimizer for module in modules if module.optimizer is not None]
        if len(modules) > 1 or len(optimizers) > 1:
            raise ConfigError(
                f"model: {len(modules)} modules and {len(optimizers)} optimizers; a session takes one of each:"
                " combine the modules"
            )
        if optimizers and not modules:
            raise ConfigError(f"model: {type(optimizers[0]).__name__} without its module; give [module, optimizer]")
        return (cls(modules[0], optimizers[0] if optimizers else None) if modules else None), rest

    def __str__(self) -> str:
        return type(self.module.module).__name__

    def check_trains(self) -> None:
        """Raise ConfigError if there is no optimiser."""
        if self.optimizer is None:
            raise ConfigError(
                "model: the module has no optimizer to save; create an ndt.DistributedOptimizer for the module, or"
                " give [module, optimizer]"
            )

    def count(self) -> None:
        """Count a step, and hear the flags of all ranks, which come with gradients that the optimiser divides."""
        if self.divided is None:
            super().count()
        else:
            self.sync.flags.reduced[:] = self.sync.header
            self.step += 1

    @property
    def sync_states(self) -> Sequence[SyncState]:
        """State of gradient synchronisation that is kept from step to step."""
        return () if self.divided is None else self.divided.compressed.state()

    def kept_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return the module's state and the optimiser's, by the names that a TorchModel has for them."""
        names = [name.removeprefix(f"{MODULE}/") for name in slots]
        found: list[tuple[ParameterShard, Any]] = []
        if isinstance(self.optimizer, DistributedOptimizer):
            found = self.optimizer.slots(names)
        elif self.optimizer is not None:
            tensors = dict(self.module.named_parameters())
            begin_slots(tensors, self.optimizer, names)
            found = self._whole(slots_of(tensors, self.optimizer))
        return {"model": self._whole(kept_tensors(self.module)), "optimizer": found}

    def settings(self) -> dict[str, Any]:
        """Return settings of the parameter groups, forwards of the module, and the random numbers of all ranks."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self._groups]
        mine = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        everyone = self.grid.world.allgather(mine)
        states = sorted(set(everyone))  # ranks but the first have the same, as a rule
        return {
            "groups": to_plain("param_groups", groups),
            "forwards": self.counted.step,
            "random": {"states": states, "ranks": [states.index(state) for state in everyone]},
        }

    def take_settings(self, settings: Mapping[str, Any]) -> None:
        """Go on with what `settings` returned; further ranks take the random numbers of the last one."""
        groups = of_kind("'groups'", settings.get("groups"), list)
        if len(groups) != len(self._groups):
            raise ValueError(f"has {len(groups)} parameter groups, the optimizer {len(self._groups)}")
        for group, found in zip(self._groups, groups, strict=True):
            given = from_plain(group, of_kind("a group of parameters", found, dict))
            group.update({name: value for name, value in given.items() if name != "params"})
        self.counted.step = whole("'forwards'", settings.get("forwards"))
        random = of_kind("'random'", settings.get("random"), dict)
        states, ranks = (of_kind(f"'{name}'", random.get(name), list) for name in ("states", "ranks"))
        at = whole("'ranks'", ranks[min(self.grid.rank, len(ranks) - 1)]) if ranks else len(states)
        if at >= len(states):
            raise ValueError("'random' has no state for this rank")
        state = bytearray(base64.b64decode(of_kind("a random state", states[at], str), validate=True))
        try:
            torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"its random state is invalid ({error})") from None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[ParameterShard, Any]]:
        arrays = {name: as_array(tensor) for name, tensor in tensors.items()}
        shards = {
            name: ParameterShard(MODULE, name, Parameter(array.shape), self.grid) for name, array in arrays.items()
        }
        return [(shards[name], array) for name, array in arrays.items()]
