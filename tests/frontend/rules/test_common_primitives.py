"""Every primitive that at least ten of 96 published training functions use has a rule of its own.

Counted over the jaxprs of functions from language, vision, speech, graph, physics and probabilistic packages. Calls
(jit, remat) are not ops: capture looks inside.
"""

import pytest

from planner.frontend.rules.base import REGISTRY, rule_for

# fmt: off
COMMON = (
    "mul", "broadcast_in_dim", "reduce_sum", "add", "div", "sub", "add_any", "dot_general", "transpose",
    "reshape", "convert_element_type", "select_n", "neg", "max", "eq", "exp", "lt", "squeeze", "stop_gradient",
    "integer_pow", "gather", "reduce_max", "scatter-add", "log", "abs", "ge", "slice", "concatenate", "iota",
    "pad", "sign", "is_finite", "rsqrt", "gt", "square", "split", "sqrt", "tanh", "logistic", "ne",
    "custom_jvp_call", "or", "scan", "and", "bitcast_convert_type", "random_bits", "conv_general_dilated",
    "shift_right_logical", "copy", "pow", "random_wrap", "rev", "cos", "sin", "log1p", "min", "scatter",
    "random_unwrap", "dynamic_slice", "random_split", "not", "random_fold_in", "cumsum", "rem", "custom_vjp_call",
)
# fmt: on


@pytest.mark.parametrize("primitive", COMMON)
def test_it_has_a_rule(primitive):
    assert rule_for(primitive) is not REGISTRY["unknown"]
