"""The plan document. Names, never indices or solver vectors; bytes are int, times float seconds.

A plan says everything that execution needs beyond the training task itself: which blocks each stage runs, on which
devices, how every op of those blocks is split, where parameters, gradients and optimizer state live, in which order
microbatches go through. It also says what that was predicted to cost, how good it is proven to be, and where each
figure comes from.
"""

from typing import Literal

import msgspec

SCHEMA_VERSION = 1


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record on disk."""


class MeshAxis(Document, frozen=True):
    name: str
    size: int


class ParameterPlan(Document, frozen=True):
    """Where one parameter lives on one stage group.

    The three specs have one entry a tensor dim: the names of the mesh axes that split it, major to minor.

    Attributes:
        shape: the part of the parameter that this stage holds: a stacked parameter's leading dim counts its own layers.
        dtype: master dtype, as the user stored it; gradient_dtype is that of the accumulated gradient.
        value: spec between steps and through the step. A dim split here and gathered by its ops is ZeRO-3.
        gradient: spec of the accumulated gradient. Where it splits and `value` does not, each microbatch's gradient is
            reduce-scattered (ZeRO-2).
        optimizer: spec of the optimizer state and the update. Where it splits and `value` does not: ZeRO-1 or 2.
        reduced_over: mesh axes over which the gradient is summed once a step.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    gradient_dtype: str
    value: tuple[tuple[str, ...], ...]
    gradient: tuple[tuple[str, ...], ...]
    optimizer: tuple[tuple[str, ...], ...]
    reduced_over: tuple[str, ...] = ()
    trained: bool = True


class ValuePlan(Document, frozen=True):
    """Spec of a value that crosses blocks: per dim the axes that split it, and the axes over which it is varying
    (equal values, summed cotangent) or partial (a pending sum)."""

    dims: tuple[tuple[str, ...], ...]
    varying: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()


class BlockStrategy(Document, frozen=True):
    """How the ops of one block class are split on one group.

    Attributes:
        block_class: canonical hash of the class.
        ops: op name -> mesh axis -> factor name, or ``replicated``, ``varying``, ``pass 0`` (a pending sum passes
            through operand set 0). An op that is absent is replicated on every axis.
        inputs: spec of each block input, by the class's name for it; parameters as their ops see them.
        outputs: spec of each block output.
        remat: what the backward pass recomputes: ``none`` (nothing but gathered weights) or ``full``.
    """

    block_class: str
    ops: dict[str, dict[str, str]]
    inputs: dict[str, ValuePlan]
    outputs: dict[str, ValuePlan]
    remat: Literal["none", "full"] = "none"


class MemoryPlan(Document, frozen=True):
    """Predicted bytes on each device of a group; `total_bytes` is their sum and `limit_bytes` the device's.

    Attributes:
        gradients_bytes: accumulated, or of a step of one microbatch those that are there at its fullest moment;
            arising_bytes: one microbatch's, as far as they lie beside them and what is saved.
        saved_bytes: kept for the backward passes of all microbatches in flight, when they hold the most. In a step that
            is one program it may be less than `saved_per_microbatch_bytes` says: the compiler computes some again, and
            at the fullest moment some may be gone.
        transient_bytes: of the fullest moment of a backward pass, beyond all these.
        inputs_bytes: the group's share of the step's batch, and carried state.
        update_bytes: what reduction and update take beyond what is free by then.
        saved_per_microbatch_bytes: what one microbatch keeps from its F to its B; until_weights_bytes: from its B to
            its W, in a schedule that has any (what B recomputed under remat is W's input); made_for_weights_bytes: what
            of that B makes, while it still holds what it had.
    """

    parameters_bytes: int
    gradients_bytes: int
    arising_bytes: int
    optimizer_bytes: int
    inputs_bytes: int
    saved_bytes: int
    transient_bytes: int
    buffers_bytes: int
    update_bytes: int
    reserve_bytes: int
    total_bytes: int
    limit_bytes: int
    in_flight: int
    saved_per_microbatch_bytes: int
    until_weights_bytes: int = 0
    made_for_weights_bytes: int = 0


class TimePlan(Document, frozen=True):
    """Predicted seconds of one stage group: per microbatch, and once a step. Communication is part of each.

    `exchange_s`, once a step and not part of `once_s`: gradients meet with those of the stage's other groups, and of
    parameters tied to other stages.

    Attributes:
        weight_s: the part of `backward_s` that only weight gradients need: W, where the schedule splits backwards.
        chunk_forward, chunk_backward: where the schedule cuts sequences into chunks, what each takes of `forward_s` and
            `backward_s`, which are then the mean over chunks.
    """

    forward_s: float
    backward_s: float
    once_s: float
    forward_communication_s: float
    backward_communication_s: float
    gradient_reduction_s: float
    optimizer_s: float
    collectives: dict[str, int]  # "forward all_gather data" -> count a microbatch
    exchange_s: float = 0.0
    weight_s: float = 0.0
    chunk_forward: tuple[float, ...] = ()
    chunk_backward: tuple[float, ...] = ()


class GroupPlan(Document, frozen=True):
    """Devices of one kind that run a stage for a share of its microbatches."""

    name: str
    kind: str
    devices: tuple[str, ...]  # cluster device ids, row-major over the mesh
    mesh: tuple[MeshAxis, ...]
    microbatches: tuple[int, ...]
    strategies: tuple[BlockStrategy, ...]
    parameters: tuple[ParameterPlan, ...]
    memory: MemoryPlan
    time: TimePlan


class StagePlan(Document, frozen=True):
    """A contiguous range of blocks. `blocks` lists runs of names: ``embedding``, ``layers[0:12]``, ``head``.

    Under a schedule with virtual stages there is an entry for each of these. Those that one actor runs, as its action
    list says, name the same devices, which hold the parameters and activations of all of them.
    """

    blocks: tuple[str, ...]
    block_count: int
    groups: tuple[GroupPlan, ...]


class TransferLink(Document, frozen=True):
    """What one microbatch costs between a group of a stage and a group of the next: seconds for which activations and
    gradients occupy the link, and seconds until they arrive that do not occupy it."""

    from_group: int
    to_group: int
    activation_s: float
    gradient_s: float
    latency_s: float


class Slack(Document, frozen=True):
    """How much later the messages between the devices of two stages may arrive, both ways, than planned, all else as
    planned. Transfers between the same devices (of looped schedules) are late together and have the same slack.

    Attributes:
        free_s: without the step ending later.
        absorbs_s: without costing more than filling and draining the pipeline once over these ways; beyond it every few
            microbatches pay again. Null: any delay.
    """

    free_s: float
    absorbs_s: float | None


class Transfer(Document, frozen=True):
    """Values that one stage hands to another, each microbatch; values that skip stages are charged at each one.

    Attributes:
        time_s: of the slowest link, latency included.
        links: between all pairs of groups. Where there are none, `time_s` holds for all.
        slack: null where both stages are on the same devices, or where the schedule is too long to look for it.
    """

    from_stage: int
    to_stage: int
    values: tuple[str, ...]
    bytes: int
    gradient_bytes: int
    time_s: float
    links: tuple[TransferLink, ...] = ()
    slack: Slack | None = None


class TiedParameter(Document, frozen=True):
    """A parameter that several stages read: the owner updates it, the others send it their gradient."""

    path: str
    owner_stage: int
    other_stages: tuple[int, ...]
    bytes: int


class UpdateJoin(Document, frozen=True):
    """The optimizer joins values of several stages (the norm of all gradients, say): the update of `stage` begins when
    all stages of `waits_for` have their gradients, and `time_s` later."""

    stage: int
    waits_for: tuple[int, ...]
    time_s: float


class ActorPlan(Document, frozen=True):
    """The action list of one stage group, such as ``0F0 0F1 0B0 0B1``; of several groups (virtual stages) where the
    actions name other stages: `stage` then counts actors.

    Attributes:
        warm_up: forwards before the first backward; null where a plan does not say.
    """

    stage: int
    group: int
    actions: str
    warm_up: int | None = None


class SchedulePlan(Document, frozen=True):
    """The order of actions.

    Attributes:
        microbatches: units that flow through the stages, which actions count.
        chunks: slices that each microbatch's sequence is cut into: unit n·chunks + j is slice j of microbatch n.
    """

    name: str
    microbatches: int
    actors: tuple[ActorPlan, ...]
    chunks: int = 1


class Prediction(Document, frozen=True):
    """The step time and what it is made of, on the stage that ends last: compute + exposed + bubble + optimizer."""

    step_time_s: float
    compute_s: float
    exposed_communication_s: dict[str, float]
    bubble_s: float
    optimizer_s: float
    examples_per_s: float
    tokens_per_s: float | None
    model_flops: float
    mfu: float | None
    price_per_step: float | None
    peak_memory_bytes: int
    provenance: dict[str, str]  # figure -> measured | interpolated | compiled | fitted | datasheet | assumed


class Certificate(Document, frozen=True):
    """How good the plan is proven to be.

    Attributes:
        lower_bound_s: no plan of the declared space is faster, by this cost model.
        gap: 1 - lower_bound_s / step_time_s.
        hardware_bound_s: FLOPs over the whole cluster's achievable rate: holds outside any space.
        space: what was and was not searched, in words.
        limit_fired: a work limit stopped the search before its proof.
    """

    lower_bound_s: float
    gap: float
    hardware_bound_s: float
    hardware_gap: float
    space: tuple[str, ...]
    status: str
    limit_fired: bool


class BaselinePlan(Document, frozen=True):
    """A hand-written configuration, scored by the same model."""

    name: str
    description: str
    feasible: bool
    step_time_s: float | None
    peak_memory_bytes: int | None
    reason: str = ""


class Finding(Document, frozen=True):
    """Something the user should know: a stable code, a message and what to do."""

    code: str
    severity: Literal["error", "warning", "note"]
    message: str
    hint: str = ""
    where: str = ""


class ModelRecord(Document, frozen=True):
    """The model as captured.

    Attributes:
        parameter_shapes: every parameter's whole shape by path, to name what changed.
        block_classes: class of equal blocks -> its blocks, as runs of names. Every group has a strategy for each class
            of its blocks.
    """

    name: str
    fingerprint: str
    reduction: str
    parameters: int
    trained_parameters: int
    blocks: tuple[str, ...]  # every block of the model in order, as runs of names
    block_count: int
    spec: str | None = None  # what --model was given, so that `run` can find the task again
    sequence: int | None = None
    parameter_shapes: dict[str, tuple[int, ...]] = {}
    block_classes: dict[str, tuple[str, ...]] = {}


class ClusterRecord(Document, frozen=True):
    name: str
    fingerprint: str
    devices: int
    kinds: dict[str, int]


class Plan(Document, frozen=True):
    schema_version: int
    name: str
    model: ModelRecord
    cluster: ClusterRecord
    global_batch: int
    microbatch_size: int
    microbatches: int
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    tied: tuple[TiedParameter, ...]
    schedule: SchedulePlan
    prediction: Prediction
    certificate: Certificate
    baselines: tuple[BaselinePlan, ...]
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    update_joins: tuple[UpdateJoin, ...] = ()
    profile: str | None = None
    compile_check: dict[str, str] | None = None

    def __repr__(self) -> str:
        """One screen: head line, stages, worst memory, bound."""
        from planner.report.explain import explain

        return explain(self).summary

    def _repr_html_(self) -> str:
        from planner.report.explain import explain

        return explain(self)._repr_html_()
