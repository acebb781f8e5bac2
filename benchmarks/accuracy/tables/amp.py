"""AMP's trials: GPT-2 on sixteen T4s, and on twelve V100s with four T4s."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.accuracy.cases import Case, Fabric, gpt, number, read, whole

T4_NODE = Fabric("T4", 4, 6.25e9, 6.25e9, nics=1, intra_latency_s=1e-5, inter_latency_s=3e-5)
V100_NODE = Fabric("V100-SXM2-16GB", 4, 21.25e9, 1.25e9, nics=1, intra_latency_s=5e-6, inter_latency_s=3e-5)

# Megatron-DeepSpeed's pipeline module has 30 units: a cast, the embedding, a transposition, the layers, a
# transposition, the last norm, and the logits.
_FIRST_LAYER, _LAYERS = 3, 24


def amp(folder: Path) -> Iterator[Case]:
    """Trials of both clusters. In the mixed one the T4 node is the last, as in the script that ran the trials."""
    for i, r in enumerate(read(folder, "amp_heterogeneous_trials")):
        if r["experiment"] not in ("homogeneous", "het_cluster"):
            continue
        mixed = r["experiment"] == "het_cluster"
        tp, dp, pp, micro = (whole(r, name) for name in ("tp", "dp", "pp", "micro_batch_seqs"))
        batch = whole(r, "global_batch_seqs")
        if batch % (dp * micro):
            continue
        borders = json.loads(r["layer_partition_boundaries"])
        layers = [
            sum(_FIRST_LAYER <= unit < _FIRST_LAYER + _LAYERS for unit in range(a, b))
            for a, b in itertools.pairwise(borders)
        ]
        measured = r["measured_s_per_iteration"]
        yield Case(
            table="amp_het_cluster" if mixed else "amp_t4",
            row=i,
            model=gpt(1024, _LAYERS, 16, 1024, 52256, dtype="float16"),
            fabrics=((V100_NODE, 3), (T4_NODE, 1)) if mixed else ((T4_NODE, 4),),
            stack="amp-mixed" if mixed else "amp-t4",
            strategy={
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "microbatch": micro,
                "attention": "graph",  # the script that launched them asks for none of Megatron-LM's fused kernels
                "gradient_dtype": "float16",
                "scatter_gather": True,  # DeepSpeed sends parts of activations between tensor-parallel stages
                "partition": tuple(layers) if pp > 1 else None,
            },
            global_batch=batch,
            measured_s=float(measured) if number(measured) else None,
            fits=False if r["failed_or_oom"] == "yes" else True if number(measured) else None,
            group=("amp", mixed, batch),
        )
