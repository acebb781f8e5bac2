"""A published function planned on one mesh and run on fake devices, and the same step on one device.

The device kind is slow and its links are fast, so that tiny models are split as far as they can be.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from costmodel.collectives import AxisLink
from costmodel.estimator import Pricing
from costmodel.sharding import local_fraction, shifted_spec
from planner.frontend.capture import Capture
from planner.frontend.flat import Value
from planner.frontend.graph import model_graph
from planner.frontend.task import TrainingTask
from planner.lowering.feed import Feed
from planner.lowering.microbatch import MicrobatchProgram
from planner.lowering.one_stage import OneStageTrainer
from planner.lowering.placement import GroupPlacement
from planner.lowering.stage import StageProgram
from planner.lowering.update import Updater, parts_of
from planner.planfile.schema import BlockStrategy, GroupPlan, MemoryPlan, MeshAxis, ParameterPlan, TimePlan
from planner.planfile.specs import dims_of, strategy_names, value_from_spec
from planner.search.intra_op import solve
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace, Setting
from profiles.cluster_files import load_cluster
