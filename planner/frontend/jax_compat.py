"""Every line of meshplan that depends on JAX internals or on its version. The rest of the code uses public JAX only."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax.parallel import all_gather_invariant as _all_gather_invariant

ClosedJaxpr, Jaxpr, Literal, DropVar, Var = jex.ClosedJaxpr, jex.Jaxpr, jex.Literal, jex.DropVar, jex.Var
Primitive = jex.Primitive


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value inside shard_map may differ from device to device."""
    return frozenset(jax.typeof(x).mat.varying)


def to_varying(x: Any, axes: Sequence[str]) -> Any:
    """Marks `x` as varying over `axes` (those over which it is not yet); its cotangent is summed over them."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather_invariant(x: Any, axis: str, dim: int) -> Any:
    """All-gather whose result is known to be equal on every device; its transpose is a slice."""
    return _all_gather_invariant(x, axis, axis=dim, tiled=True)


def source_of(eqn: Any) -> str:
    """``file.py:12 (function)`` of the user's line that made an equation, or ''."""
    frame = _source_info.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line} ({frame.function_name})"


def bind(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Evaluates one equation's primitive; always a list of results."""
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def array(value: Any, aval: Any) -> Any:
    """A captured value as an array of its abstract type."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)


def as_closed(jaxpr: Any) -> Any:
    """An open jaxpr as a closed one without constants."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def inner_jaxpr(eqn: Any) -> Any:
    """The closed jaxpr that a call equation runs."""
    return as_closed(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))


def implementation(primitive: Any, params: dict[str, Any], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of what a primitive's own implementation does."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return jax.make_jaxpr(lambda *args: primitive.impl(*args, **params))(*structs)


def custom_jvp_jaxpr(params: dict[str, Any], zeros: tuple[bool, ...]) -> tuple[Any, tuple[bool, ...]]:
    """The user's jvp rule as a closed jaxpr of (primals, nonzero tangents) -> (results, nonzero tangents of results).

    Args:
        zeros: for each primal (constants left out), whether its tangent is symbolically zero.

    Returns:
        the jaxpr, and for each result whether its tangent is symbolically zero.
    """
    jaxpr, consts, out_zeros = params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return ClosedJaxpr(jaxpr, consts), tuple(out_zeros)


def custom_vjp_forward(params: dict[str, Any], moving: tuple[bool, ...]) -> tuple[Any, int]:
    """The user's fwd as a closed jaxpr of args -> (residuals, outputs), and the number of residuals.

    Args:
        moving: for each argument (constants left out), whether it can have a cotangent.
    """
    consts, avals = params["num_consts"], params["call_jaxpr"].in_avals
    jaxpr, captured = params["fwd_jaxpr_thunk"].call_wrapped(*moving)
    _, res_tree, forwarded = params["out_trees"]()  # residuals that are arguments: their positions, constants included
    made = res_tree.num_leaves - sum(f is not None for f in forwarded)

    def whole(*args: Any) -> list[Any]:
        outs = _core.eval_jaxpr(jaxpr, captured, *args)
        own = iter(outs[:made])
        return [*(next(own) if f is None else args[f - consts] for f in forwarded), *outs[made:]]

    return jax.make_jaxpr(whole)(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals[consts:]]), res_tree.num_leaves


def custom_vjp_backward(params: dict[str, Any]) -> Callable[..., Any]:
    """The user's bwd on flat (residuals, cotangents) -> flat input cotangents."""
    return params["bwd"].call_wrapped


def is_zero(cotangent: Any) -> bool:
    """Whether a cotangent is symbolically zero."""
    return isinstance(cotangent, _ad.Zero)


def zero_tangent(primal: Any) -> Any:
    """The zero tangent of a value (float0 for integers)."""
    return _ad.instantiate_zeros(_ad.Zero(_core.typeof(primal).to_tangent_aval()))


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def key_implementation(dtype: Any) -> str:
    """Name of the generator of a typed key's dtype, for `jax.random.wrap_key_data`."""
    return dtype._impl.name


def key_words(keys: Any) -> Any:
    """Typed PRNG keys as their raw words."""
    return jax.random.key_data(keys)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a PRNG key counts its raw words."""
    if is_key(dtype):
        return 4 * int(dtype._impl.key_shape[-1])
    return int(dtype.itemsize)


def wrapped_fun(value: Any) -> bool:
    """Whether a jaxpr parameter is a wrapped function (no stable text)."""
    return isinstance(value, _lu.WrappedFun)


def is_drop(var: Any) -> bool:
    return isinstance(var, DropVar)


def eval_closed(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr as it is."""
    return _core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def constant_outputs(closed: Any) -> list[bool]:
    """For each output of a closed jaxpr whether it depends on no input."""
    moved = set(closed.jaxpr.invars)
    for eqn in closed.jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in moved for v in eqn.invars):
            moved.update(eqn.outvars)
    return [isinstance(v, Literal) or v not in moved for v in closed.jaxpr.outvars]


def name_stack(eqn: Any) -> str:
    """Transformations and named scopes around an equation, such as ``transpose(jvp())/update``."""
    return str(eqn.source_info.name_stack)


def collective_axes(eqn: Any) -> tuple[str, ...]:
    """Mesh axes of a collective's equation."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (ClosedJaxpr, Jaxpr))


def literal(atom: Any) -> Any:
    """A literal's value; a number as a NumPy scalar of its type."""
    return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom.val, (bool, int, float, complex)) else atom.val


def replay(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates an equation as it stands in its jaxpr: with its context, under its name; always a list of results."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        return bind(eqn.primitive, args, eqn.params)


def stacked_aval(aval: Any, length: int) -> Any:
    """Abstract type of what a scan stacks of values of a type."""
    return _core.unmapped_aval(length, 0, aval)


def without_dead_code(closed: Any) -> Any:
    """A closed jaxpr without the equations that no output needs, loops and calls included; it keeps its inputs."""
    jaxpr, _ = _pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)
