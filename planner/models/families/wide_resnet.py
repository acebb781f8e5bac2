"""Wide ResNet: bottleneck convolutions in four groups; the family with carried state (batch statistics).

In each group the first block changes the size; the others are equal and are scanned. Shapes: b batch, y and x spatial,
c channels; convolutions are NHWC with HWIO kernels.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from costmodel.errors import InputError
from planner.frontend.task import TrainingTask
from planner.models import checks
from planner.models.layers import Params, cross_entropy, dense, norm_shapes, weight

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
EXPANSION = 4
NORM_GROUPS = 32
NORM_EPS = 1e-5
# What the running statistics keep of their old value at each microbatch.
STATISTICS_DECAY = 0.9

State = Any


def wide_resnet(
    *,
    depth: int = 50,
    blocks: tuple[int, ...] | None = None,
    wide: int = 2,
    width: int = 64,
    image: int = 224,
    channels: int = 3,
    classes: int = 1000,
    batch: int = 8,
    norm: str = "batch",
    dtype: str = "bfloat16",
    optimizer: optax.GradientTransformation | None = None,
    name: str | None = None,
) -> TrainingTask:
    """Classification training of a Wide ResNet. Loss: mean over all images. Optimizer: SGD with momentum.

    Args:
        depth: 50, 101 or 152; sets `blocks`.
        blocks: number of bottleneck blocks in each group, instead of `depth`.
        wide: factor on the inner channels of every bottleneck; 1 is the plain ResNet.
        width: channels of the first group (64 as published).
        norm: ``batch`` normalises by the microbatch's own statistics and carries running statistics as state;
            ``group`` normalises each example alone and has no state.

    Batch: ``images`` float32 ``[b, image, image, channels]``, ``labels`` int32 ``[b]``.
    """
    if blocks is None:
        if depth not in DEPTHS:
            raise InputError(
                "MP122",
                f"wide_resnet: depth={depth!r} is not one of {', '.join(map(str, DEPTHS))}",
                "give blocks=(3,4,6,3) for another depth",
            )
        blocks = DEPTHS[depth]
    if not isinstance(blocks, tuple | list) or not blocks:
        raise InputError(
            "MP122", f"wide_resnet: blocks={blocks!r} is not a tuple of counts", "for example blocks=(3,4,6,3)"
        )
    checks.positive_integers("wide_resnet", **{f"blocks[{i}]": count for i, count in enumerate(blocks)})
    checks.positive_integers("wide_resnet", wide=wide, width=width, image=image, channels=channels)
    checks.positive_integers("wide_resnet", classes=classes, batch=batch)
    checks.one_of("wide_resnet", "norm", norm, ("batch", "group"))
    if norm == "group":
        checks.divides("wide_resnet", "norm groups", NORM_GROUPS, "width", width)

    params: dict[str, Any] = {"stem": _convolution_shapes(7, channels, width)}
    size = width
    for index, count in enumerate(blocks):
        out = width * EXPANSION * 2**index
        inner = width * wide * 2**index
        group = {"first": _bottleneck_shapes((), size, inner, out)}
        if count > 1:
            group["rest"] = _bottleneck_shapes((count - 1,), out, inner, out)
        params[f"group{index + 1}"] = group
        size = out
    params["head"] = {"kernel": weight(size, classes), "bias": weight(classes)}
    return TrainingTask(
        loss_fn=partial(loss if norm == "batch" else stateless_loss, dtype=checks.compute_dtype("wide_resnet", dtype)),
        params=params,
        batch={
            "images": jax.ShapeDtypeStruct((batch, image, image, channels), jnp.float32),
            "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
        },
        optimizer=optax.sgd(0.1, momentum=0.9) if optimizer is None else optimizer,
        state=_statistics(params) if norm == "batch" else None,
        name=name or f"wide_resnet(blocks={','.join(map(str, blocks))};wide={wide},width={width},image={image})",
    )


def _convolution_shapes(side: int, inputs: int, outputs: int, lead: tuple[int, ...] = ()) -> dict[str, Any]:
    return {
        "kernel": weight(*lead, side, side, inputs, outputs),
        "norm": norm_shapes(*lead, outputs, bias=True),
    }


def _bottleneck_shapes(lead: tuple[int, ...], inputs: int, inner: int, outputs: int) -> dict[str, Any]:
    shapes = {
        "reduce": _convolution_shapes(1, inputs, inner, lead),
        "spatial": _convolution_shapes(3, inner, inner, lead),
        "expand": _convolution_shapes(1, inner, outputs, lead),
    }
    return shapes if lead else shapes | {"shortcut": _convolution_shapes(1, inputs, outputs)}


def _statistics(params: Any) -> State:
    """A running mean and variance, shaped like the gain, for every convolution with a norm."""
    if "norm" in params:
        return {"mean": params["norm"]["scale"], "variance": params["norm"]["scale"]}
    return {name: _statistics(part) for name, part in params.items() if name != "head"}


def loss(params: Params, batch: Params, state: State, *, dtype: jnp.dtype) -> tuple[jax.Array, State]:
    """Mean cross entropy over ``[b]`` images, a float32 scalar, and the new running statistics."""
    scores, state = logits(params, batch["images"], state, dtype=dtype)
    return jnp.mean(cross_entropy(scores, batch["labels"])), state


def stateless_loss(params: Params, batch: Params, *, dtype: jnp.dtype) -> jax.Array:
    """Mean cross entropy over ``[b]`` images with group norm."""
    return jnp.mean(cross_entropy(logits(params, batch["images"], None, dtype=dtype)[0], batch["labels"]))


def logits(params: Params, images: jax.Array, state: State, *, dtype: jnp.dtype) -> tuple[jax.Array, State]:
    """Images ``[b, side, side, channels]`` to ``[b, classes]`` logits, and the new state (None with group norm)."""
    new: dict[str, Any] = {}
    x, new["stem"] = _convolve(images.astype(dtype), params["stem"], _part(state, "stem"), stride=2)
    x = lax.reduce_window(
        jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    )
    for name in (f"group{index + 1}" for index in range(len(params) - 2)):
        group, old = params[name], _part(state, name)
        new[name] = {}
        # The first group keeps the size that the pooling has left.
        stride = 1 if name == "group1" else 2
        x, new[name]["first"] = _bottleneck(x, group["first"], _part(old, "first"), stride=stride)
        if "rest" in group:

            def block(x: jax.Array, xs: tuple[Params, State]) -> tuple[jax.Array, State]:
                return _bottleneck(x, xs[0], xs[1], stride=1)

            x, new[name]["rest"] = lax.scan(block, x, (group["rest"], _part(old, "rest")))
    return dense(jnp.mean(x, axis=(1, 2)), params["head"]), None if state is None else new


def _part(state: State, name: str) -> State:
    return None if state is None else state[name]


def _bottleneck(x: jax.Array, params: Params, state: State, *, stride: int) -> tuple[jax.Array, State]:
    """Reduce, convolve, expand, add: ``[b, y, x, c] -> [b, y/stride, x/stride, c']``."""
    new: dict[str, Any] = {}
    y, new["reduce"] = _convolve(x, params["reduce"], _part(state, "reduce"), stride=1)
    y, new["spatial"] = _convolve(jax.nn.relu(y), params["spatial"], _part(state, "spatial"), stride=stride)
    y, new["expand"] = _convolve(jax.nn.relu(y), params["expand"], _part(state, "expand"), stride=1)
    if "shortcut" in params:
        x, new["shortcut"] = _convolve(x, params["shortcut"], _part(state, "shortcut"), stride=stride)
    return jax.nn.relu(x + y), None if state is None else new


def _convolve(x: jax.Array, params: Params, state: State, *, stride: int) -> tuple[jax.Array, State]:
    """Convolution and norm; the norm is over the batch where there is state, and over channel groups where not."""
    kernel = params["kernel"].astype(x.dtype)
    pad = (kernel.shape[0] - 1) // 2
    y = lax.conv_general_dilated(
        x, kernel, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    if state is None:
        return group_norm(y, params["norm"]), None
    return batch_norm(y, params["norm"], state)


def batch_norm(x: jax.Array, norm: Params, state: State) -> tuple[jax.Array, State]:
    """Normalise ``[b, y, x, c]`` by its own mean and variance over b, y, x; move the running ones towards them."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    centred = wide - mean
    variance = jnp.mean(centred * centred, axis=(0, 1, 2))
    y = centred * (lax.rsqrt(variance + NORM_EPS) * norm["scale"]) + norm["bias"]
    seen = {"mean": lax.stop_gradient(mean), "variance": lax.stop_gradient(variance)}
    running = {k: STATISTICS_DECAY * state[k] + (1 - STATISTICS_DECAY) * seen[k] for k in seen}
    return y.astype(x.dtype), running


def group_norm(x: jax.Array, norm: Params) -> jax.Array:
    """Normalise ``[b, y, x, c]`` within each example over y, x and each of `NORM_GROUPS` groups of channels."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], NORM_GROUPS, -1)
    centred = wide - jnp.mean(wide, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(centred * centred, axis=(1, 2, 4), keepdims=True)
    y = (centred * lax.rsqrt(variance + NORM_EPS)).reshape(x.shape)
    return (y * norm["scale"] + norm["bias"]).astype(x.dtype)
