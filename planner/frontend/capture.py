"""From a training task to blocks: trace on abstract values, flatten, cut, classify. No array is ever made."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import planner.frontend.rules  # noqa: F401  (fills the registry)
from costmodel.errors import InputError
from costmodel.graph import Role, Source, Tensor
from planner.frontend import jax_compat as jc
from planner.frontend.blocks import BlockClass, interface, make_class, segment
from planner.frontend.flat import Constant, Equation, Operand, Program, Value, flatten, prune
from planner.frontend.folding import fold_picks
from planner.frontend.gradients import (
    annotated,
    depends,
    depends_in_loop,
    needing_gradient,
    needing_gradient_in_loop,
)
from planner.frontend.keys import keys_first
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.task import TrainingTask, path_string


@dataclass(frozen=True, eq=False)
class BlockInstance:
    """A block of the model: its class, where its inputs come from and where its outputs go."""

    name: str
    cls: BlockClass
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]
    run: int = -1  # number of the run, -1 for a block on its own
    position: int = 0  # in its run


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive equal blocks that came from one scan.

    Attributes:
        kinds: for each class input ``const``, ``carry`` or ``stacked``; carries come out in the same order, first.
        reverse: the scan walks its stacked inputs from the end.
    """

    name: str
    first: int
    length: int
    kinds: tuple[str, ...]
    reverse: bool


@dataclass(frozen=True, eq=False)
class InputInfo:
    """A leaf of the task: what it is, and its place in its own pytree."""

    role: Role
    path: str
    leaf: int
    trained: bool = False


@dataclass(frozen=True, eq=False)
class Capture:
    """A task captured at one microbatch size.

    Attributes:
        inputs: program-wide input name -> what it is.
        values: every value that crosses blocks, by name.
        loss: names of the loss, or of the sum and the weight.
        state, aux: names of the new state's and the aux outputs' leaves (None for constants).
        program: the flat program, scans whole.
    """

    task: TrainingTask
    microbatch: int
    program: Program
    inputs: dict[str, InputInfo]
    values: dict[str, Tensor]
    blocks: tuple[BlockInstance, ...]
    runs: tuple[Run, ...]
    loss: tuple[Operand, ...]
    state: tuple[Operand, ...]
    aux: tuple[Operand, ...]
    aux_tree: Any
    classes: dict[str, BlockClass] = field(default_factory=dict)

    @cached_property
    def flops(self) -> float:
        return sum(block.cls.flops for block in self.blocks)

    @cached_property
    def param_inputs(self) -> dict[str, InputInfo]:
        return {name: info for name, info in self.inputs.items() if info.role == "param"}


def input_names(task: TrainingTask) -> dict[str, InputInfo]:
    """Name of every leaf of the task, in the order of the traced function's arguments."""
    names: dict[str, InputInfo] = {}
    for role, tree in (("param", task.params), ("batch", task.batch), ("state", task.state)):
        prefix = "" if role == "param" else f"{role}:"
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
            text = path_string(path)
            floating = role == "param" and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
            trained = floating and not (task.frozen is not None and task.frozen(text))
            names[f"{prefix}{text}" or f"{role}"] = InputInfo(role, text, i, trained)  # type: ignore[arg-type]
    if task.rng:
        names["rng"] = InputInfo("rng", "rng", 0)
    return names


def flat_function(task: TrainingTask, found: dict[str, Any]) -> Callable[..., list[Any]]:
    """The user's function on flat leaves -> [loss or sum, weight; state leaves; aux leaves]. Fills
    `found["aux_tree"]`."""
    trees = [jax.tree.structure(t) for t in (task.params, task.batch, task.state)]
    sizes = np.cumsum([t.num_leaves for t in trees])

    def run(*leaves: Any) -> list[Any]:
        params, batch, state = (
            jax.tree.unflatten(t, leaves[end - t.num_leaves : end]) for t, end in zip(trees, sizes, strict=True)
        )
        extra: dict[str, Any] = {}
        if task.state is not None:
            extra["state"] = state
        if task.rng:
            extra["rng"] = leaves[sizes[-1]]
        result = task.loss_fn(params, batch, **extra)
        parts = list(result) if task.state is not None or task.has_aux else [result]
        expected = 1 + (task.state is not None) + task.has_aux
        if len(parts) != expected:
            raise InputError(
                "MP112",
                f"the loss function returned {len(parts)} values where this task declares {expected}",
                "state= adds one returned value and has_aux=True another: (loss, new_state, aux)",
            )
        loss = parts.pop(0)
        if task.reduction == "weighted":
            if not (isinstance(loss, tuple) and len(loss) == 2):
                raise InputError(
                    "MP112",
                    "reduction='weighted' needs the loss function to return the pair (sum, weight)",
                    "return (jnp.sum(per_token * mask), jnp.sum(mask))",
                )
            losses = list(loss)
        else:
            losses = [loss]
        for value in losses:
            if np.shape(value) != ():
                raise InputError(
                    "MP112",
                    f"the loss has shape {np.shape(value)}; a loss is a scalar",
                    "reduce it (jnp.mean), or declare reduction='weighted' and return (sum, weight)",
                )
            if not jax.numpy.issubdtype(jax.numpy.asarray(value).dtype, jax.numpy.floating):
                raise InputError(
                    "MP112", f"the loss has dtype {jax.numpy.asarray(value).dtype}; a loss is a real number", ""
                )
        new_state = jax.tree.leaves(parts.pop(0)) if task.state is not None else []
        if task.state is not None and len(new_state) != trees[2].num_leaves:
            raise InputError(
                "MP112",
                f"the new state has {len(new_state)} leaves, the old one {trees[2].num_leaves}",
                "return the state with the structure it came in",
            )
        aux, found["aux_tree"] = jax.tree.flatten(parts.pop(0) if task.has_aux else None)
        return _distinct([*losses, *new_state, *aux], leaves)

    return run


def _distinct(outputs: list[Any], leaves: Sequence[Any]) -> list[Any]:
    """Outputs that are values of their own: one that is an input, or an earlier output too (the loss as an aux output),
    is copied, so that each can be handed out in its own sharding."""
    seen = {id(x) for x in leaves}
    result = []
    for x in outputs:
        if id(x) in seen and isinstance(x, jax.Array) and not jc.is_key(x.dtype):
            x = jnp.copy(x)
        seen.add(id(x))
        result.append(x)
    return result


def _abstract_leaves(task: TrainingTask, microbatch: int) -> list[Any]:
    leaves = [
        *jax.tree.leaves(task.params),
        *jax.tree.leaves(task.with_batch_size(microbatch)),
        *jax.tree.leaves(task.state),
    ]
    if task.rng:
        leaves.append(jax.eval_shape(lambda: jax.random.key(0)))
    return leaves


def trace(task: TrainingTask, microbatch: int) -> tuple[Program, Any, int]:
    """The flat program of one microbatch, the aux tree, and the number of aux leaves."""
    found: dict[str, Any] = {}
    run = flat_function(task, found)
    try:
        closed = jax.make_jaxpr(run)(*_abstract_leaves(task, microbatch))
    except InputError:
        raise
    except Exception as error:
        at = _user_line(error)
        raise InputError(
            "MP113",
            f"tracing the loss function with a microbatch of {microbatch} failed{at}: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            "the function must trace under jax.make_jaxpr with ShapeDtypeStructs; "
            "sizes along batch dims must not be hard-wired",
        ) from error
    return flatten(closed, list(input_names(task))), found["aux_tree"], found["aux_tree"].num_leaves


def _user_line(error: BaseException) -> str:
    """`` at file.py:12 (function)``: the innermost frame outside JAX and meshplan."""
    trace_, found = error.__traceback__, ""
    while trace_ is not None:
        code = trace_.tb_frame.f_code
        if "site-packages/jax" not in code.co_filename and "planner/frontend" not in code.co_filename:
            found = f" at {code.co_filename.rsplit('/', 1)[-1]}:{trace_.tb_lineno} ({code.co_name})"
        trace_ = trace_.tb_next
    return found


def capture(task: TrainingTask, microbatch: int) -> Capture:
    """Captures a task at one microbatch size (examples over the whole group that runs a microbatch).

    Raises:
        InputError: the function does not trace, or what it returns is not what the task declares.
    """
    program, aux_tree, aux_count = trace(task, microbatch)
    infos = input_names(task)
    program = annotated(program, depends(program, [name for name, info in infos.items() if info.trained]))
    losses = 2 if task.reduction == "weighted" else 1
    program = fold_picks(program)
    program = keys_first(program, [v for v in program.inputs if infos[v.name].role == "rng"])
    program = _early_results(program, losses)
    loss = program.outputs[:losses]
    state = program.outputs[losses : len(program.outputs) - aux_count]
    aux = program.outputs[len(program.outputs) - aux_count :]
    builder = _Builder(program, infos, loss)
    builder.build()
    values = {v.name: builder.tensor(v) for v in program.inputs} | builder.values
    for operand in program.outputs:
        if isinstance(operand, Value):
            values.setdefault(operand.name, builder.tensor(operand))
    return Capture(
        task=task,
        microbatch=microbatch,
        program=program,
        inputs=infos,
        values=values,
        blocks=tuple(builder.blocks),
        runs=tuple(builder.runs),
        loss=loss,
        state=state,
        aux=aux,
        aux_tree=aux_tree,
        classes=builder.classes,
    )


def _early_results(program: Program, losses: int) -> Program:
    """Moves what only new state and aux outputs need to where its inputs are made.

    Functions compute such results last. Left there, they would keep early values alive through all blocks, and a state
    leaf that an early stage reads would come from the last one: microbatches could not follow each other.
    """
    loss = prune(Program(program.inputs, program.equations, program.outputs[:losses], program.constants))
    fixed = {e.name for e in loss.equations}
    inputs = set(program.inputs)
    anywhere = {v for v in inputs if v.name.startswith(("batch:", "state:")) or v.name == "rng"}
    place: dict[Value, int] = {}
    for i, e in enumerate(program.equations):
        for o in e.inputs:  # parameters are held by the stage that reads them for the loss
            if isinstance(o, Value) and o in inputs and e.name in fixed:
                place.setdefault(o, i)
        place.update(dict.fromkeys(e.outputs, i))
    key: dict[str, tuple[int, int]] = {e.name: (i, i) for i, e in enumerate(program.equations)}
    free = [
        (i, e)
        for i, e in enumerate(program.equations)
        if e.name not in fixed and not e.scopes and not e.params.get("effects")
    ]
    floating: list[tuple[int, Equation]] = []  # made of state and batch alone: go where they are read
    for i, e in free:
        found = [place[o] for o in e.inputs if isinstance(o, Value) and o in place and o not in anywhere]
        if not found:
            floating.append((i, e))
            anywhere.update(e.outputs)
            continue
        key[e.name] = (max(found), i)
        place.update(dict.fromkeys(e.outputs, max(found)))
    readers: dict[Value, list[str]] = {}
    for _, r in free:
        for o in r.inputs:
            if isinstance(o, Value):
                readers.setdefault(o, []).append(r.name)
    for i, e in reversed(floating):
        key[e.name] = (min((key[r][0] for v in e.outputs for r in readers.get(v, ())), default=i), i)
    equations = tuple(sorted(program.equations, key=lambda e: key[e.name]))
    return Program(program.inputs, equations, program.outputs, program.constants)


def _is_layers(equation: Equation, params: set[Value]) -> bool:
    """Whether a scan walks over stacked parameters: a run of layers rather than a loop over data."""
    if equation.primitive.name != "scan" or equation.scopes or equation.params["length"] < 2:
        return False
    stacked = equation.inputs[equation.params["num_consts"] + equation.params["num_carry"] :]
    return any(isinstance(o, Value) and o in params for o in stacked)


class _Builder:
    """Walks the flat program once and collects blocks."""

    def __init__(self, program: Program, infos: dict[str, InputInfo], loss: Sequence[Operand]):
        self.program, self.infos = program, infos
        trained = [name for name, info in infos.items() if info.trained]
        self.moved = depends(program, trained)
        self.grads = needing_gradient(program, trained, loss)
        self.params = {v for v in program.inputs if infos[v.name].role == "param"}
        self.classes: dict[str, BlockClass] = {}
        self.blocks: list[BlockInstance] = []
        self.runs: list[Run] = []
        self.values: dict[str, Tensor] = {}
        self.names: Counter[str] = Counter()

    def needs_grad(self, value: Value) -> bool:
        return value.name in self.grads

    def role(self, value: Value) -> Role:
        if value.name in self.infos:
            return self.infos[value.name].role
        return "const" if value in self.program.constants else "activation"

    def tensor(self, value: Value, shape: tuple[int, ...] | None = None) -> Tensor:
        dtype = value.aval.dtype
        shape = value.shape if shape is None else shape
        return Tensor(value.name, shape, str(dtype), jc.itemsize(dtype), self.role(value), self.needs_grad(value))

    def build(self) -> None:
        equations, used_later = self._sink_casts()
        layers = [i for i, e in enumerate(equations) if _is_layers(e, self.params)]
        start = 0
        for n, at in enumerate([*layers, len(equations)]):
            if at > start:
                later = used_later(at)
                ends = "embedding" if n == 0 else "head" if n == len(layers) else "middle"
                self._straight(equations[start:at], later, ends if layers else "")
            if at < len(equations):
                self._scan(equations[at], used_later(at + 1))
            start = at + 1

    def _sink_casts(self) -> tuple[list[Equation], Callable[[int], set[Value]]]:
        """Moves a dtype cast of a whole stacked parameter into the layers that read it; a function of what is used from
        a position on comes along."""
        program = self.program
        uses = Counter(o for e in program.equations for o in e.inputs if isinstance(o, Value))
        uses.update(o for o in program.outputs if isinstance(o, Value))
        casts = {
            e.outputs[0]: e
            for e in program.equations
            if e.primitive.name == "convert_element_type"
            and e.inputs[0] in self.params
            and uses[e.outputs[0]] == 1
            and not e.scopes
        }
        sunk: dict[Value, Equation] = {}
        equations: list[Equation] = []
        for e in program.equations:
            if e.primitive.name == "scan" and not e.scopes and any(o in casts for o in e.inputs):
                first = e.params["num_consts"] + e.params["num_carry"]
                taken = {i: casts[o] for i, o in enumerate(e.inputs) if i >= first and o in casts}
                if taken:
                    sunk.update({c.outputs[0]: c for c in taken.values()})
                    inputs = tuple(taken[i].inputs[0] if i in taken else o for i, o in enumerate(e.inputs))
                    e = replace(e, inputs=inputs, params={**e.params, "sunk": taken})
            equations.append(e)
        equations = [e for e in equations if e.outputs[0] not in sunk] if sunk else equations
        positions: dict[Value, int] = {o: len(equations) for o in program.outputs if isinstance(o, Value)}
        for i, e in enumerate(equations):
            for o in e.inputs:
                if isinstance(o, Value):
                    positions[o] = max(i, positions.get(o, -1))
        return equations, lambda at: {v for v, last in positions.items() if last >= at}

    def _add(
        self,
        name: str,
        cls: BlockClass,
        inputs: Sequence[Source],
        outputs: Sequence[Source],
        run: int = -1,
        at: int = 0,
    ) -> None:
        self.blocks.append(BlockInstance(name, cls, tuple(inputs), tuple(outputs), run, at))

    def _unique(self, name: str) -> str:
        self.names[name] += 1
        return name if self.names[name] == 1 else f"{name}{self.names[name]}"

    def _straight(self, equations: Sequence[Equation], later: set[Value], name: str) -> None:
        flops = [op_from_equation(e, rule_for(e.primitive.name), self.needs_grad).flops for e in equations]
        cuts = [(0, len(equations), -1)]
        if not name or (sum(flops) > 0 and len(equations) > 400):
            cuts = segment(equations, flops, later, lambda v: self.role(v), self.needs_grad)
        labels = self._labels(cuts, name)
        used: dict[Value, int] = {}
        for i, e in enumerate(equations):
            for o in e.inputs:
                if isinstance(o, Value):
                    used[o] = i
        positions: Counter[int] = Counter()
        for (a, b, run), label in zip(cuts, labels, strict=True):
            after = {v for e in equations[a:b] for v in e.outputs if v in later or used.get(v, -1) >= b}
            inputs, outputs, constants = interface(equations[a:b], after, self.program.constants)
            cls = make_class(
                equations[a:b],
                inputs,
                outputs,
                [self.role(v) for v in inputs],
                self.needs_grad,
                self.classes,
                constants,
            )
            self.values.update({v.name: self.tensor(v) for v in (*inputs, *outputs)})
            self._add(
                label, cls, [Source(v.name) for v in inputs], [Source(v.name) for v in outputs], -1, positions[run]
            )
            positions[run] += 1

    def _labels(self, cuts: Sequence[tuple[int, int, int]], name: str) -> list[str]:
        if len(cuts) == 1:
            return [self._unique(name or "model")]
        lengths = Counter(run for _, _, run in cuts if run >= 0)
        run_names: dict[int, str] = {}
        labels, at = [], Counter()
        for i, (_, _, run) in enumerate(cuts):
            if run >= 0 and lengths[run] > 1:
                run_names.setdefault(run, self._unique("layers"))
                labels.append(f"{run_names[run]}[{at[run]}]")
                at[run] += 1
            else:
                edge = "embedding" if i == 0 else "head" if i == len(cuts) - 1 else "part"
                labels.append(self._unique(name if name else edge))
        return labels

    def _scan(self, equation: Equation, later: set[Value]) -> None:
        """A scan over stacked parameters becomes one block a layer."""
        params = equation.params
        consts, carry, length = params["num_consts"], params["num_carry"], params["length"]
        body = flatten(params["jaxpr"], [f"in.{i}" for i in range(len(equation.inputs))])
        body = _with_casts(body, params.get("sunk", {}))
        inputs = body.inputs
        moving = {
            inputs[i].name for i, o in enumerate(equation.inputs) if isinstance(o, Value) and o.name in self.moved
        }
        body = annotated(body, depends_in_loop(body, carry, consts, moving))
        seeds = {inputs[i].name for i, o in enumerate(equation.inputs) if isinstance(o, Value) and self.needs_grad(o)}
        wanted = {i for i, v in enumerate(equation.outputs) if self.needs_grad(v)}
        grads = needing_gradient_in_loop(body, carry, consts, seeds, wanted)
        roles: list[Role] = []
        for i, o in enumerate(equation.inputs):
            known = isinstance(o, Value) and not consts <= i < consts + carry
            roles.append(self.role(o) if known else "activation")  # type: ignore[arg-type]
        cls = make_class(
            body.equations, inputs, body.outputs, roles, lambda v: v.name in grads, self.classes, body.constants
        )
        kinds = ("const",) * consts + ("carry",) * carry + ("stacked",) * (len(equation.inputs) - consts - carry)
        name = self._unique(self._run_name(equation))
        run = len(self.runs)
        self.runs.append(Run(name, len(self.blocks), length, kinds, params["reverse"]))
        for o in equation.inputs:
            assert isinstance(o, Value)
            self.values.setdefault(o.name, self.tensor(o))
        for v in equation.outputs:
            self.values[v.name] = self.tensor(v)
        for i in range(length):
            item = length - 1 - i if params["reverse"] else i
            sources, results = [], []
            for j, o in enumerate(equation.inputs):
                assert isinstance(o, Value)
                if kinds[j] == "carry" and i > 0:
                    sources.append(Source(f"{name}.carry{j - consts}@{i}"))
                else:
                    sources.append(Source(o.name, item if kinds[j] == "stacked" else None))
            for j, v in enumerate(equation.outputs):
                if j >= carry:
                    results.append(Source(v.name, item))
                elif i == length - 1:
                    results.append(Source(v.name))
                else:
                    crossing = f"{name}.carry{j}@{i + 1}"
                    inner = inputs[consts + j]
                    self.values[crossing] = Tensor(
                        crossing,
                        v.shape,
                        str(v.aval.dtype),
                        jc.itemsize(v.aval.dtype),
                        "activation",
                        inner.name in grads,
                    )
                    results.append(Source(crossing))
            self._add(f"{name}[{i}]", cls, sources, results, run, i)

    def _run_name(self, equation: Equation) -> str:
        """The common path of the stacked parameters, ``layers`` where they have none."""
        paths = [
            self.infos[o.name].path.split("/") for o in equation.inputs if isinstance(o, Value) and o in self.params
        ]
        common: list[str] = []
        for parts in zip(*paths):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        if paths and len(common) == len(paths[0]):
            common = common[:-1]
        return ".".join(common) or "layers"


def _with_casts(body: Program, sunk: dict[int, Equation]) -> Program:
    """A loop body whose inputs `sunk` come uncast: the cast runs first, on the slice."""
    if not sunk:
        return body
    inputs, first = list(body.inputs), []
    for i, cast in sunk.items():
        whole = cast.inputs[0]
        raw = Value(inputs[i].name, whole.aval.update(shape=whole.shape[1:]))
        cooked = inputs[i]
        label = f"convert_element_type.sunk{i}"
        inner = Value(label, cooked.aval)
        first.append((raw, inner, Equation(label, cast.primitive, (raw,), (inner,), dict(cast.params), cast.source)))
        inputs[i] = raw
    swap = {old.name: inner for (raw, inner, _), i in zip(first, sunk, strict=True) for old in [body.inputs[i]]}

    def new(o: Operand) -> Operand:
        return swap[o.name] if isinstance(o, Value) and o.name in swap else o

    equations = [replace(e, inputs=tuple(new(o) for o in e.inputs)) for e in body.equations]
    return Program(
        tuple(inputs), (*(e for _, _, e in first), *equations), tuple(new(o) for o in body.outputs), body.constants
    )


__all__ = [
    "BlockInstance",
    "Capture",
    "Constant",
    "InputInfo",
    "Run",
    "Source",
    "capture",
    "flat_function",
    "input_names",
    "trace",
]
