"""Compiles fast rather than well, and keeps the packages to JAX: this must run before JAX makes its devices."""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["USE_TORCH"] = os.environ["USE_TF"] = "0"
for _flag in ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"):
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
