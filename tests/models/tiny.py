"""Every family at a size that compiles and runs in a second or two."""

from collections.abc import Callable
from functools import partial

import jax

from planner.frontend.task import TrainingTask
from planner.models import bert, gpt, init_state, llama, moe, t5, vit, wide_resnet

# Compiling is most of the time of these tests, and running next to none of it.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

TINY: dict[str, Callable[..., TrainingTask]] = {
    "gpt": partial(gpt, hidden=16, layers=3, heads=4, vocab=32, seq=8, batch=4),
    "gpt-neox": partial(
        gpt, hidden=16, layers=3, heads=2, vocab=32, seq=8, batch=4, rotary_fraction=0.5, parallel=True, tied=False
    ),
    "gpt-dropout": partial(gpt, hidden=16, layers=3, heads=4, vocab=32, seq=8, batch=4, dropout=0.1),
    "llama": partial(llama, hidden=16, layers=3, heads=4, kv_heads=2, ffn=32, vocab=32, seq=8, batch=4),
    "llama-qwen": partial(
        llama, hidden=16, layers=3, heads=4, head_dim=6, ffn=32, vocab=32, seq=8, batch=4, qkv_bias=True, tied=True
    ),
    "bert": partial(bert, hidden=16, layers=3, heads=4, vocab=32, seq=8, batch=4),
    "t5": partial(t5, hidden=16, layers=3, heads=4, ffn=32, vocab=32, seq=8, target_seq=6, batch=4),
    "t5-gated": partial(
        t5, hidden=16, layers=3, decoder_layers=2, heads=4, ffn=32, vocab=32, seq=8, batch=4, gated=True, tied=False
    ),
    "moe": partial(moe, hidden=16, layers=3, heads=4, kv_heads=2, ffn=32, experts=4, vocab=32, seq=8, batch=4),
    "moe-capacity": partial(
        moe,
        hidden=16,
        layers=3,
        heads=4,
        ffn=32,
        experts=4,
        vocab=32,
        seq=8,
        batch=4,
        capacity_factor=1.0,
        balance_weight=0.01,
    ),
    "vit": partial(vit, hidden=16, layers=3, heads=4, patch=4, image=8, classes=8, batch=4),
    "vit-mean": partial(vit, hidden=16, layers=3, heads=4, patch=4, image=8, classes=8, batch=4, pool="mean"),
    "wide_resnet": partial(wide_resnet, blocks=(3, 2), wide=2, width=8, image=32, classes=8, batch=4),
    "wide_resnet-group": partial(
        wide_resnet, blocks=(3, 1), wide=1, width=32, image=32, classes=8, batch=4, norm="group"
    ),
}


def scalar_loss(task: TrainingTask) -> Callable[..., jax.Array]:
    """The loss of one microbatch as a scalar function of params and batch, whatever else the task takes or returns."""
    extra = {}
    if task.state is not None:
        extra["state"] = init_state(task)
    if task.rng:
        extra["rng"] = jax.random.key(7)

    def loss(params, batch):
        out = task.loss_fn(params, batch, **extra)
        if task.reduction == "weighted":
            return out[0] / out[1]
        return out if task.state is None else out[0]

    return loss
