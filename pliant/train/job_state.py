"""The whole state of a job, as a new worker or a checkpoint gets it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pliant.errors import TrainError
from pliant.train import state_tree
from pliant.train.adaptation import Adaptation
from pliant.train.bucket_layout import BucketLayout
from pliant.train.context import ReplicaContext, upgrade_context
from pliant.train.events import Progress
from pliant.train.gradients import GradientReducer
from pliant.train.optim import AveragingOptimizer
from pliant.train.replicas import ModelBuffers, Replicas, Tensors
from pliant.train.state_sign import StateSign


class JobState:
    """The parts of a job that a new worker must know. It reads them, and loads them again."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: dict[str, Any],
        replicas: Replicas,
        reducers: Sequence[GradientReducer],
        adaptation: Adaptation,
        progress: Progress,
        averaging: AveragingOptimizer | None = None,
        *,
        keeps_layout: bool = True,
        sync_buffers: bool = True,
    ) -> None:
        self.models, self.optimizers, self.tracked = models, optimizers, tracked
        self.replicas, self.reducers, self.adaptation, self.progress = replicas, reducers, adaptation, progress
        self.averaging = averaging
        self.keeps_layout = keeps_layout
        """Whether the bucket layout outlives a view. If not, a new view begins with L1, as a restarted DDP would."""
        self.sync_buffers = sync_buffers
        self.run = ""
        """The id of this run, which its checkpoints have."""
        self.buffers = ModelBuffers(models)
        self._first_buffers: Tensors = self.buffers.save()
        self._are_in_models = False
        """Whether the models have the buffers of replica 0, and the program may change them there."""
        self.lent: dict[str, Any] = {}
        """What others are given in place of the present state (`StepStart.to_lend`)."""
        self.answers: list[Any] = []
        """What all workers have found together in this epoch before its first step, for those that come later."""
        self._loaded: dict[str, Any] | None = None
        self._loaded_sign: StateSign | None = None
        """The sign of parameters and optimizer states, if they were loaded in place."""
        self._copied_models: list[bool] = []
        """For each model whether a state that was loaded in place had to be copied to it."""
        self._spare: dict[state_tree.Place, torch.Tensor] = {}
        """Memory of optimizer states that the next state may use."""
        self.is_guarded = True
        """Whether the workers compare their states soon after a change."""

    @property
    def first_buffers(self) -> Tensors:
        """Copies of the buffers of replica 0: what DDP would broadcast."""
        if self._are_in_models:
            self._first_buffers = self.buffers.save()
        return self._first_buffers

    def use_first_buffers(self, found: Tensors, *, are_in_models: bool = False) -> None:
        self._first_buffers, self._are_in_models = found, are_in_models

    def show_first_buffers(self) -> None:
        """Give the models the buffers of replica 0. From now on the program may change them there."""
        if not self._are_in_models:
            self.buffers.load(self._first_buffers)
            self._are_in_models = True

    def keep_first_buffers(self) -> None:
        """Keep the buffers of replica 0 as they are now: turns, or an evaluation, will change those of the models."""
        self.use_first_buffers(self.first_buffers)

    def read(self) -> dict[str, Any]:
        """Return all that a new worker must know: references, no copies."""
        progress, replicas = self.progress, self.replicas
        tracked = self.lent.get("tracked") or {name: each.state_dict() for name, each in self.tracked.items()}
        contexts = self.lent.get("contexts", replicas.contexts)
        return {
            "progress": [progress.epoch, progress.epoch_step, progress.step, progress.passes, progress.in_epoch],
            "models": [model.state_dict() for model in self.models],
            "optimizers": self._optimizer_states(),
            "tracked": tracked,
            "buffers": list(self.lent.get("buffers", self.first_buffers)),
            "gradients": [reducer.carried() for reducer in self.reducers],
            "layouts": [self._layout(reducer) for reducer in self.reducers],
            "contexts": [context.to_bytes(replicas.num_loader_workers) for context in contexts],
            "data": [context.extra for context in contexts],
            "answers": self.answers,
            "adaptation": self.lent.get("adaptation") or self.adaptation.state_dict(),
            "run": self.run,
        }

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters."""
        return next((each.device for model in self.models for each in model.parameters()), None)

    def own_tensors(self) -> dict[state_tree.Place, torch.Tensor]:
        """Return the memory of parameters, buffers and optimizer states by their place in what `read` returns, so that
        another worker's state can be written there."""
        owned = {each.data_ptr() for model in self.models for each in (*model.parameters(), *model.buffers())}
        for optimizer in self.optimizers:
            kept = [values for values in optimizer.state.values() if isinstance(values, dict)]
            owned |= {each.data_ptr() for values in kept for each in values.values() if isinstance(each, torch.Tensor)}
        found = {"models": [model.state_dict() for model in self.models], "optimizers": self._optimizer_states()}
        skeleton, tensors = state_tree.flatten(found)
        # A state_dict may also hold tensors that were made for it: to write there would have no effect.
        return self._spare | {
            place: tensors[number]
            for number, place in state_tree.places(skeleton).items()
            if tensors[number].data_ptr() in owned and tensors[number].is_contiguous()
        }

    def keep_memory(self) -> None:
        """Keep the memory of the optimizer states, which a shadow gives up, for the state that will be fetched."""
        self._spare = {place: each for place, each in self.own_tensors().items() if place[0].startswith("optimizers.")}

    def _optimizer_states(self) -> list[dict[str, Any]]:
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        for state, options in zip(states, self.lent.get("options", ()), strict=False):
            groups = zip(state["param_groups"], options, strict=True)
            state["param_groups"] = [{**group, **lent} for group, lent in groups]
        return states

    def _layout(self, reducer: GradientReducer) -> list[list[int]] | None:
        """Return L2 once it is in use. Under D0 return None, because a restarted DDP begins with L1 again."""
        if reducer.waits_for_order or not reducer.wanted or not self.keeps_layout:
            return None
        return reducer.layout.to_json()

    def load(self, state: dict[str, Any], *, in_place: bool = False) -> None:
        """Load a state. If `in_place`, some of its tensors lie where they belong already (`own_tensors`), and the optimizers
        may keep the others. Raises TrainError if its program tracks other objects, or has other models."""
        self._loaded, self._loaded_sign, self._spare = state, None, {}
        models = state["models"] if "models" in state else [state["model"]]  # a checkpoint of version 0.1 has one
        missing = set(state["tracked"]) ^ set(self.tracked)
        if missing:
            unknown, lacking = (
                sorted(set(state["tracked"]) - set(self.tracked)),
                sorted(set(self.tracked) - set(state["tracked"])),
            )
            raise TrainError(
                f"the tracked objects differ: the state to load has {unknown} that this program does not track, and lacks "
                f"{lacking}: call job.track and job.state as the program that wrote it did"
            )
        if len(models) != len(self.models) or len(state["optimizers"]) != len(self.optimizers):
            raise TrainError(
                f"the state to load has {len(models)} models and {len(state['optimizers'])} optimizers, but this program gave "
                f"job.wrap {len(self.models)} and {len(self.optimizers)}: use the program that wrote the state, or start "
                "without this checkpoint"
            )
        self._copied_models = []
        for model, saved in zip(self.models, models, strict=True):
            is_copied = not in_place or not _is_loaded(model, saved)
            self._copied_models.append(is_copied)
            if is_copied:
                model.load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # The program must not change what is kept.
            optimizer.load_state_dict(saved if in_place else copy.deepcopy(saved))
        self._load_rest(state)
        if in_place and self.progress.in_epoch:
            self._loaded_sign = self._sign()

    def _load_rest(self, state: dict[str, Any]) -> None:
        """Load all but parameters and optimizers."""
        layouts = state["layouts"] if "layouts" in state else [state["layout"]]
        for name, saved in state["tracked"].items():
            self.tracked[name].load_state_dict(copy.deepcopy(saved))
        own = self._first_buffers
        found = [saved.to(each.device) for saved, each in zip(state["buffers"], own, strict=True)]
        self.use_first_buffers(found)
        self.buffers.load(found)
        if self.averaging is not None:
            self.averaging.before_load(state["progress"][2])
        replicas = self.replicas
        contexts, extras = state["contexts"], state.get("data")
        if extras is None:  # of a checkpoint of version 0.1
            contexts, extras = [upgrade_context(data) for data in contexts], [b""] * len(contexts)
        replicas.contexts = [
            ReplicaContext.from_bytes(data, replicas.num_loader_workers, extra)
            for data, extra in zip(contexts, extras, strict=True)
        ]
        replicas.count = len(replicas.contexts)
        for reducer, layout in zip(self.reducers, layouts, strict=True):
            reducer.use_layout(BucketLayout.from_json(layout) if layout is not None else None)
            reducer.num_replicas = replicas.count
        if "gradients" in state:  # old checkpoints have none
            for reducer, gradients in zip(self.reducers, state["gradients"], strict=True):
                reducer.carry(gradients)
        progress = Progress(*state["progress"])
        if len(state["progress"]) < 5:  # of an old checkpoint
            progress.in_epoch = progress.epoch_step > 0
        self.progress.set(progress)
        self.answers = list(state.get("answers", ()))  # old checkpoints have none
        self.run = state.get("run", self.run)  # a checkpoint has it elsewhere: whoever loads one is another run
        if "adaptation" in state:  # old checkpoints have none
            self.adaptation.load_state_dict(state["adaptation"])

    def _sign(self) -> StateSign:
        return StateSign(self.models, self.optimizers, is_thorough=not self.is_guarded)

    def reload(self) -> bool:
        """Load the state that was loaded last once more: what the program has done to it since does not count. Return False
        if that is impossible: the program has changed tensors of which there is no copy."""
        loaded, sign = self._loaded, self._loaded_sign
        if loaded is not None and sign is not None:
            if not sign.is_same(self._sign()):
                return False
            for model, saved, is_copied in zip(self.models, loaded["models"], self._copied_models, strict=True):
                if is_copied:
                    model.load_state_dict(saved)
            for optimizer, saved in zip(self.optimizers, loaded["optimizers"], strict=True):
                if not _has_options(optimizer, saved):
                    optimizer.load_state_dict(saved)
            self._load_rest(loaded)
        elif loaded is not None:
            self.load(loaded)
        self.forget_loaded()
        return True

    def forget_loaded(self) -> None:
        """Free the memory of the state that was loaded last."""
        self._loaded, self._loaded_sign, self._spare = None, None, {}


def _has_options(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> bool:
    """Return whether an optimizer whose tensors are as they were loaded has the saved options, and nothing else."""
    kind = type(optimizer)
    if kind.state_dict is not torch.optim.Optimizer.state_dict or saved.keys() != {"state", "param_groups"}:
        return False
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    theirs = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    values = [value for group in own for value in group.values()]
    if any(isinstance(each, torch.Tensor) or not isinstance(each, int | float | str | tuple | None) for each in values):
        return False  # it may be changed in place
    return own == theirs


def _is_loaded(model: torch.nn.Module, saved: Mapping[str, Any]) -> bool:
    """Return whether all that is saved lies in the model's own memory already, and loading it does nothing else."""
    for module in model.modules():
        loaders = (type(module).load_state_dict, type(module)._load_from_state_dict)
        hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
        if any(hooks) or not all(loader.__module__.startswith("torch.nn.") for loader in loaders):
            return False
    own = model.state_dict()
    return saved.keys() == own.keys() and all(_is_same_memory(saved[name], own[name]) for name in own)


def _is_same_memory(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return (
        one.data_ptr() == other.data_ptr()
        and (one.dtype, one.device, one.shape, one.stride()) == (other.dtype, other.device, other.shape, other.stride())
    ) or (one.shape == other.shape and not one.numel())
