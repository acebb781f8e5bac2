"""What the words of a report mean."""

PROVENANCE_MEANINGS = {
    "measured": "timed on such a device",
    "interpolated": "between timed points",
    "compiled": "said by the compiler",
    "fitted": "a formula with constants fitted to measurements",
    "datasheet": "a vendor's figure",
    "assumed": "a guess: measure it or state it in the cluster file",
}

GLOSSARY = {
    "stage": "contiguous blocks that one or more groups of devices run",
    "block": "a unit that the pipeline does not cut, such as one layer",
    "microbatch": "the part of the global batch that goes through the stages at once",
    "F": "time of the forward pass of one microbatch, with its communication",
    "B": "time of the backward pass of one microbatch, with its communication and recomputation",
    "once": "time once a step: gradient reduction and optimizer",
    "binds": "the slowest group (*): in the steady state the others wait for it",
    "remat": "full: the backward pass recomputes a block's activations from its input; none: it reads saved ones",
    "in flight": "microbatches whose activations a stage holds at one time",
    "bubble": "time in which the stage that ends last waits for others",
    "exposed": "communication that no computation hides",
    "gap": "1 - lower bound / step time",
    "pp": "pipeline parallelism: stages on different devices",
    "dp": "data parallelism: each part of the devices takes a part of the microbatch",
    "zero": "on the dp axes, 1: optimizer state is split; 2: gradients too; 3: parameters too, gathered for use "
    "(FSDP); 1..3: this differs between parameters",
    "tp": "tensor parallelism: parameters and their products are split",
    "sp": "sequence parallelism: activations between the split products are split too",
    "cp": "context parallelism: activations are split along a dim other than the batch, parameters are whole",
    "ep": "expert parallelism: parameters are split over the dp axis and activations exchanged",
    "copy": "the devices of this axis repeat the same work",
    "gpipe": "schedule: all forwards, then all backwards",
    "1f1b": "schedule: after a warm-up, one forward and one backward in turn, so fewer microbatches are in flight",
    "interleaved": "schedule: 1f1b with several chunks of layers a stage",
    "zb-h1": "schedule: weight gradients split off to fill bubbles, at the memory of 1f1b",
    "zb-h2": "schedule: weight gradients split off to fill bubbles, at twice the memory of 1f1b",
    "zb-v": "schedule: two chunks of layers a stage, in the shape of a V",
}
