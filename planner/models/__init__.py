"""Reference models, model-configuration import, and concrete parameters and batches for them.

Every model is a `TrainingTask` of plain JAX functions over abstract parameters: building one allocates nothing.
"""

from planner.models.attention import RopeScaling
from planner.models.catalog import ModelRow, list_models, parameter_count
from planner.models.families.bert import bert
from planner.models.families.gpt import gpt
from planner.models.families.llama import llama
from planner.models.families.moe import moe
from planner.models.families.t5 import t5
from planner.models.families.vit import vit
from planner.models.families.wide_resnet import wide_resnet
from planner.models.initialise import example_batch, init_params, init_state
from planner.models.load import load_model

__all__ = [
    "ModelRow",
    "RopeScaling",
    "bert",
    "example_batch",
    "gpt",
    "init_params",
    "init_state",
    "list_models",
    "llama",
    "load_model",
    "moe",
    "parameter_count",
    "t5",
    "vit",
    "wide_resnet",
]
