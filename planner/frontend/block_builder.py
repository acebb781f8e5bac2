"""Blocks of a flat program: scans over stacked parameters become one block a layer, what lies between them is cut."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Role, Source, Tensor
from planner.frontend import jax_compat as jc
from planner.frontend.blocks import BlockClass, interface, make_class, segment
from planner.frontend.flat import Equation, Operand, Program, Value, flatten
from planner.frontend.gradients import (
    annotated,
    depends,
    depends_in_loop,
    needing_gradient,
    needing_gradient_in_loop,
)
from planner.frontend.ops import op_from_equation, rule_for
from planner.frontend.residuals import Cache as ResidualCache
from planner.frontend.sunk_casts import sink_casts, with_casts
from planner.frontend.trace import InputInfo


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


class BlockBuilder:
    """Walks the flat program once and collects blocks."""

    def __init__(self, program: Program, infos: dict[str, InputInfo], loss: Sequence[Operand]):
        self.program, self.infos = program, infos
        trained = [name for name, info in infos.items() if info.trained]
        self.moved = depends(program, trained)
        self.grads = needing_gradient(program, trained, loss)
        self.params = {v for v in program.inputs if infos[v.name].role == "param"}
        self.classes: dict[str, BlockClass] = {}
        self.residuals: ResidualCache = {}
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
        equations, used_later = sink_casts(self.program, self.params)
        layers = [i for i, e in enumerate(equations) if is_layers(e, self.params)]
        start = 0
        for n, at in enumerate([*layers, len(equations)]):
            if at > start:
                later = used_later(at)
                ends = "embedding" if n == 0 else "head" if n == len(layers) else "middle"
                self._straight(equations[start:at], later, ends if layers else "")
            if at < len(equations):
                self._scan(equations[at], used_later(at + 1))
            start = at + 1

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
                self.residuals,
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
        body = with_casts(body, params.get("sunk", {}))
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
            body.equations,
            inputs,
            body.outputs,
            roles,
            lambda v: v.name in grads,
            self.classes,
            self.residuals,
            body.constants,
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


def is_layers(equation: Equation, params: set[Value]) -> bool:
    """Whether a scan walks over stacked parameters: a run of layers rather than a loop over data."""
    if equation.primitive.name != "scan" or equation.scopes or equation.params["length"] < 2:
        return False
    stacked = equation.inputs[equation.params["num_consts"] + equation.params["num_carry"] :]
    return any(isinstance(o, Value) and o in params for o in stacked)
