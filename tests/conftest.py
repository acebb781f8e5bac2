"""Eight fake CPU devices for every test: this must run before JAX is imported anywhere.

Compiling is most of the time of the tests that execute anything, and running next to none of it: LLVM optimises as
little as it can (a third off their CPU time).
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()
