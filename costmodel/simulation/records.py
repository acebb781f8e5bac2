"""Records of a simulation: the times that it takes, and the parts of what it says. Seconds count from the start of the
step."""

from dataclasses import dataclass
from typing import NamedTuple

from costmodel.schedule.actions import Action, Actor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What one stage costs on one group.

    Args:
        forward_s: F of one microbatch.
        backward_s: B of one microbatch: activation gradient.
        weight_s: W of one microbatch: weight gradient. Where the schedule does not split backwards, B takes
            `backward_s + weight_s`, so a backward known only as a whole goes into `backward_s`.
        reduce_s: once a step after the last backward: reduction of gradients within the group.
        exchange_s: once a step: transfer and addition of gradients between the groups of the stage, which begins when
            all of them have reduced. 0 for a stage with one group.
        update_s: once a step, at the end: the optimizer.
        forward_factors, backward_factors: where sequences run in chunks, what each chunk takes of `forward_s` and
            `backward_s`, which are the mean over chunks: unit k takes factor k modulo their number. Empty: all alike.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    reduce_s: float = 0.0
    exchange_s: float = 0.0
    update_s: float = 0.0
    forward_factors: tuple[float, ...] = ()
    backward_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTimes:
    """What it costs to hand one microbatch from a group of one stage to a group of the next, and its gradient back.

    Args:
        activation_s: time for which the forward direction is occupied by one microbatch's activations.
        gradient_s: the same for gradients in the backward direction.
        latency_s: added to each arrival in either direction; it does not occupy the link.
    """

    activation_s: float
    gradient_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWait:
    """What a stage's update waits for, where the optimizer joins values of several stages (a norm of all gradients).

    Args:
        stages: those that must have reduced and exchanged their gradients, the stage itself among them.
        time_s: what it takes from then to bring the values together and back.
    """

    stages: frozenset[int]
    time_s: float


class TimelineEntry(NamedTuple):
    """One action that ran."""

    actor: Actor
    action: Action
    start_s: float
    end_s: float


class Message(NamedTuple):
    """Activations or a gradient on their way between two actors.

    Attributes:
        action: the F or B that made it.
        ready_s: end of that action; from then on the message waits for its link.
        start_s: when it began to occupy its link.
        end_s: when it stopped to.
        arrival_s: end and latency.
    """

    source: Actor
    target: Actor
    action: Action
    ready_s: float
    start_s: float
    end_s: float
    arrival_s: float


class Ending(NamedTuple):
    """What an actor does once a step after its actions.

    Attributes:
        reduce_start_s: start of the reduction of gradients in the group; before the end of the last action where part
            of it may run beside that.
        reduce_end_s: its end.
        exchange_start_s: when all groups of the stage have reduced.
        exchange_end_s: end of the exchange between them.
        update_start_s: start of the update: at once, or after values of other stages have been joined with its own.
        update_end_s: end of the step for this actor.
    """

    reduce_start_s: float
    reduce_end_s: float
    exchange_start_s: float
    exchange_end_s: float
    update_start_s: float
    update_end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorUse:
    """How one actor spent the step.

    Args:
        actor: stage and group.
        first_start_s: start of its first action; 0 if it has none.
        last_end_s: end of its last action; 0 if it has none.
        busy_s: sum of its actions' times.
        bubble_s: time between `first_start_s` and `last_end_s` in which it ran nothing.
        joined_s: time from when its gradients were ready to its update, for what the update joins of other stages.
        step_end_s: end of its parameter update.
        peak_in_flight: most microbatches whose activations it held at one time.
    """

    actor: Actor
    first_start_s: float
    last_end_s: float
    busy_s: float
    bubble_s: float
    joined_s: float
    step_end_s: float
    peak_in_flight: int
