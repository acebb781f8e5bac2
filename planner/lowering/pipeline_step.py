"""The arrays of one pipelined step on their way: what each action takes, hands on and lets go of.

An array lives no longer than its readers need it: a sent value until the last stage took it, residuals until their
backward (those that W reads until W), cotangents until they arrived. Carried state has a version for each microbatch,
as a stage may run ahead of another that still reads an older one.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from costmodel.schedule.actions import Action
from planner.frontend.flat import Value
from planner.lowering.group_programs import GroupPrograms
from planner.lowering.split_programs import Handed, SplitPrograms
from planner.lowering.state import TrainState, apart

if TYPE_CHECKING:
    from planner.lowering.pipeline import PipelineTrainer

Actor = tuple[int, int]  # (virtual) stage, group
Key = tuple[str, int]  # value, microbatch


class PipelineStep:
    """One step of a `PipelineTrainer`.

    Attributes:
        peak_in_flight: for each actor the most microbatches so far that it held something of for their B or W; under
            virtual stages each (stage, microbatch) counts.
    """

    def __init__(self, trainer: "PipelineTrainer", state: TrainState, leaves: dict[str, Any]):
        self.trainer, self.state, self.leaves = trainer, state, leaves
        self.feed = trainer.feed
        self.values: dict[Key, Any] = {}
        self.unread: dict[Key, int] = {}
        self.cotangents: dict[Key, Any] = {}
        self.residuals: dict[tuple[Actor, int], Any] = {}  # after F, for B
        self.kept: dict[tuple[Actor, int], Handed] = {}  # after B, for W
        self.in_flight: Counter[Actor] = Counter()
        self.peak_in_flight: dict[Actor, int] = dict.fromkeys(trainer.actor_of.values(), 0)
        self.totals = {actor: p.zeros() for actor, p in trainer.programs.items() if trainer.shares[actor]}
        self.losses: dict[str, list[Any]] = {}
        self.results: dict[Key, Any] = {}  # aux outputs and new state

    def _programs(self, actor: Actor, i: int) -> GroupPrograms:
        """What an actor runs for a microbatch."""
        return self.trainer.programs[actor]

    def _params(self, actor: Actor) -> dict[str, Any]:
        return self.state.params[self.trainer.index[actor]]

    def _arriving(self, programs: GroupPrograms, name: str, i: int) -> Any:
        if name in self.leaves:
            x = self.leaves[name][i] if self.feed.is_split(name) else self.leaves[name]
        elif name in self.feed.state_updates:
            x = self._carried(name, i)
        else:
            x = self.values[name, i]
            self.unread[name, i] -= 1
            if not self.unread[name, i]:
                del self.values[name, i], self.unread[name, i]
        return jax.device_put(x, programs.sharding(programs.value_specs[name]))

    def _carried(self, name: str, i: int) -> Any:
        """A leaf of the carried state as microbatch `i` sees it."""
        if i == 0:
            return self.state.carried[name]
        operand = self.feed.state_updates[name]
        if not isinstance(operand, Value):
            return jnp.asarray(operand.value, operand.aval.dtype)
        if operand.name in self.feed.state_updates:
            return self._carried(operand.name, i - 1)
        return self.results[operand.name, i - 1]

    def run(self, actor: Actor, action: Action) -> None:
        """Runs one action on a stage group."""
        i, runs = action.microbatch, self.trainer.actor_of[actor]
        if action.kind == "F":
            self._forward(actor, i)
            self.in_flight[runs] += 1
            self.peak_in_flight[runs] = max(self.peak_in_flight[runs], self.in_flight[runs])
        elif action.kind == "B":
            self._backward(actor, i)
        else:
            self._weights(actor, i)
        if (actor, i) not in self.residuals and (actor, i) not in self.kept:
            self.in_flight[runs] -= 1

    def _forward(self, actor: Actor, i: int) -> None:
        programs = self._programs(actor, i)
        given = {name: self._arriving(programs, name, i) for name in programs.value_specs}
        sent, losses, self.residuals[actor, i] = programs.forward(self._params(actor), given)
        for name, x in sent.items():
            self._hand_on(programs, name, x, i)
        for name, x in losses.items():
            self.losses.setdefault(name, []).append(x)

    def _hand_on(self, programs: GroupPrograms, name: str, x: Any, i: int) -> None:
        """Keeps a sent value until it was read."""
        if self.trainer.readers[name]:
            self.values[name, i], self.unread[name, i] = x, self.trainer.readers[name]
        if name in programs.micro.results:
            self.results[name, i] = x

    def _backward(self, actor: Actor, i: int) -> None:
        programs = self._programs(actor, i)
        arrived = {}
        for name, spec in programs.cotangent_specs.items():
            sharding = programs.sharding(spec)
            key = self._key(programs, name, i)
            if key in self.cotangents:
                arrived[name] = jax.device_put(self.cotangents.pop(key), sharding)
            else:  # a result that the loss does not depend on
                tensor = programs.micro.tensor(name)
                arrived[name] = jnp.zeros(tensor.shape, tensor.dtype, device=sharding)
        params, residuals = self._params(actor), self.residuals.pop((actor, i))
        if isinstance(programs, SplitPrograms):
            back, self.kept[actor, i] = programs.activations(params, residuals, arrived)
        else:
            back, self.totals[actor] = self._run_backward(programs, actor, i, (params, residuals, arrived))
        for name, x in back.items():
            maker, key = self._maker(actor, name, i), self._key(programs, name, i)
            x = jax.device_put(x, maker.sharding(maker.sent_specs[name]))
            known = self.cotangents.get(key)
            self.cotangents[key] = x if known is None else known + x

    def _run_backward(self, programs: GroupPrograms, actor: Actor, i: int, given: tuple[Any, Any, Any]) -> Any:
        """Cotangents of what forward took, and the accumulators."""
        return programs.backward(*given, self.totals[actor])

    def _key(self, programs: GroupPrograms, name: str, i: int) -> Key:
        """Under which the cotangent of a value is kept until its maker's B."""
        return name, i

    def _maker(self, actor: Actor, name: str, i: int) -> GroupPrograms:
        """The programs that made a value that `actor` read."""
        trainer = self.trainer
        return self._programs(trainer.runner[trainer.maker[name], i], i)

    def _weights(self, actor: Actor, i: int) -> None:
        programs = self.trainer.programs[actor]
        assert isinstance(programs, SplitPrograms)
        kept = self.kept.pop((actor, i))
        self.totals[actor] = programs.weights(self._params(actor), kept, self.totals[actor])

    def finish(self) -> tuple[TrainState, dict[str, Any]]:
        trainer, feed = self.trainer, self.feed
        parts = {n: sum(jnp.sum(jnp.asarray(np.asarray(x))) for x in self.losses[n]) for n in self.losses}
        loss, scale = feed.combine(feed.loss_totals(parts))
        new = apart(self._update(scale))
        params = [dict(p) for p in self.state.params]
        for key, part in trainer.updater.parts.items():
            for actor, index in trainer.index.items():
                p = trainer.programs[actor]
                if part.name in p.micro.held and (part.held.items is None or actor[0] == part.stage):
                    if actor != (part.stage, 0):
                        params[index][part.name].delete()  # the new value takes its place
                    params[index][part.name] = jax.device_put(new[f"param/{key}"], p.sharding(p.param_specs[part.name]))
        optimizer = {n: new[n] for n in trainer.updater.state_owner}
        carried = {n: self._carried(n, feed.microbatches) for n in self.state.carried}
        state = TrainState(tuple(params), optimizer, carried, self.state.unused)
        metrics: dict[str, Any] = {"loss": loss}
        if feed.capture.task.has_aux:
            made = {n: [self._result(n, i) for i in range(feed.microbatches)] for n in feed.aux_names if n}
            metrics["aux"] = feed.aux({n: jnp.stack(rows) for n, rows in made.items()})
        return state, metrics

    def _result(self, name: str, i: int) -> np.ndarray:
        """An aux output of a microbatch."""
        return np.asarray(self.results[name, i])

    def _update(self, scale: Any) -> dict[str, Any]:
        """Reduces gradients, joins those of groups and of tied parameters on the owner, and runs the optimizer."""
        trainer, updater = self.trainer, self.trainer.updater
        reduced = {actor: trainer.programs[actor].reduce(self.totals.pop(actor)) for actor in sorted(self.totals)}
        values: dict[str, Any] = dict(self.state.optimizer)
        for key, part in updater.parts.items():
            owner = trainer.programs[part.stage, 0]
            sharding = owner.sharding(owner.reduced_specs[part.name])
            grads = [
                jax.device_put(g.pop(part.name), sharding)
                for actor, g in reduced.items()
                if part.name in g and (part.held.items is None or actor[0] == part.stage)
            ]
            total = grads.pop(0)
            while grads:
                total = total + grads.pop(0)
            if scale is not None:
                total = (total * jax.device_put(scale, owner.sharding(PartitionSpec()))).astype(total.dtype)
            values[f"grad/{key}"] = total
            values[f"param/{key}"] = self._params((part.stage, 0))[part.name]
        for piece in updater.update_program.pieces:
            values.update(trainer.run_piece(piece, values))
            for name in updater.last_reads(piece):
                del values[name]
        return updater.collect_update(values)
