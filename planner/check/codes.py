"""The rules that a plan is checked by: a stable code, a name, and one sentence each. `docs/errors.md` says more."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What a code stands for.

    Attributes:
        code: stable, such as ``MP601``.
        name: stable, words joined by ``-``.
        severity: of its findings.
        summary: what must hold.
    """

    code: str
    name: str
    severity: Severity
    summary: str


RULES: tuple[RuleInfo, ...] = (
    RuleInfo("MP600", "cluster-fingerprint", "warning", "The cluster is the one that the plan was made for."),
    RuleInfo("MP601", "device-exists", "error", "Every device of the plan is in the cluster."),
    RuleInfo("MP602", "device-once", "error", "No device is used twice."),
    RuleInfo("MP603", "device-kind", "error", "All devices of a group are of the kind that the group states."),
    RuleInfo("MP604", "mesh-size", "error", "A group's mesh has as many places as the group has devices."),
    RuleInfo("MP605", "link-exists", "error", "Groups that hand values to each other are joined by a link."),
    RuleInfo("MP606", "block-conservation", "error", "Every block of the model is in exactly one stage, in order."),
    RuleInfo("MP607", "sharding-divides", "error", "Every split names known axes, once each, and divides its dim."),
    RuleInfo("MP608", "global-batch", "error", "Microbatches times microbatch size is the global batch."),
    RuleInfo("MP609", "microbatch-share", "error", "The groups of a stage share out the microbatches, each once."),
    RuleInfo("MP610", "schedule-complete", "error", "The schedule runs every action of every microbatch and stage."),
    RuleInfo("MP611", "schedule-once", "error", "No action runs twice."),
    RuleInfo("MP612", "schedule-order", "error", "A backward runs after its forward, on the same group."),
    RuleInfo("MP613", "schedule-deadlock", "error", "No action waits for ever."),
    RuleInfo("MP614", "schedule-place", "error", "Every action runs on a group of its own stage."),
    RuleInfo("MP615", "schedule-actors", "error", "The schedule has one readable action list per group, of its share."),
    RuleInfo("MP616", "transfer-stages", "error", "Transfers lead from one stage of the plan to the next."),
    RuleInfo("MP617", "update-stages", "error", "Updates wait for gradients of stages that the plan has."),
    RuleInfo("MP618", "words-known", "error", "Names of reductions, schedules, statuses and dtypes are legal."),
    RuleInfo("MP619", "schedule-name", "error", "The action lists are those of the schedule that the plan names."),
    RuleInfo("MP620", "memory-limit", "error", "Predicted memory fits the device."),
    RuleInfo("MP621", "memory-sum", "error", "The items of a memory prediction add up to its total."),
    RuleInfo("MP622", "in-flight", "error", "Memory is counted for as many microbatches as the schedule holds."),
    RuleInfo("MP623", "replicated-parameter", "warning", "No large parameter is held whole by many devices."),
    RuleInfo("MP624", "tied-owner", "error", "A tied parameter has one owner, and owner and readers hold it."),
    RuleInfo("MP625", "prediction-finite", "error", "Predicted times and rates are finite and positive."),
    RuleInfo("MP626", "certificate-consistent", "error", "The lower bound does not exceed the predicted time."),
    RuleInfo("MP627", "parameter-conservation", "error", "Every parameter of the model is held whole by the stages."),
    RuleInfo("MP628", "strategies-complete", "error", "A group has one strategy for each class of its blocks."),
    RuleInfo("MP629", "model-consistent", "error", "The model's counts follow from its shapes and blocks."),
    RuleInfo("MP630", "model-fingerprint", "error", "The training function computes what it did when it was planned."),
    RuleInfo("MP631", "model-blocks", "error", "The model has the blocks that were planned."),
    RuleInfo("MP632", "model-parameters", "error", "The model's parameters have the shapes that were planned."),
    RuleInfo("MP633", "model-reduction", "error", "The loss reduces over the batch as it did when it was planned."),
    RuleInfo("MP634", "model-strategies", "error", "Every block, op and parameter of the model has its place."),
    RuleInfo("MP640", "figures-follow", "error", "Predicted figures follow from each other and from the cluster."),
    RuleInfo("MP641", "step-follows", "error", "The step time is that of the schedule with the stages' times."),
    RuleInfo("MP650", "compiled-memory-limit", "error", "What the compiler allocates fits the device."),
    RuleInfo("MP651", "compiled-memory", "warning", "The compiler allocates about what was planned."),
    RuleInfo("MP652", "compiled-collectives", "warning", "Compiled programs move the bytes that were planned."),
    RuleInfo("MP653", "compiled-at-all", "error", "Every program of the plan compiles within its limits."),
    RuleInfo("MP654", "compiler-installed", "warning", "Programs are compiled by the compiler of their device kind."),
    RuleInfo("MP655", "compiled-figures", "note", "What the compiler says of a stage."),
)

MODEL_RULES = ("MP630", "MP631", "MP632", "MP633", "MP634")
"""Those that need the training function."""

COMPILE_RULES = ("MP650", "MP651", "MP652", "MP653", "MP654", "MP655")
"""Those that need a compiler, and the training function."""

RULE_BY_CODE = {rule.code: rule for rule in RULES}
