"""Eight virtual CPU devices for the whole suite, set before JAX starts its backend."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is LLVM's: programs that run for milliseconds need little of it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)

# Whole runs compile the same programs again and again; within a session they are kept.
_CACHE = os.environ.setdefault("TAPE_JAX_TEST_CACHE", tempfile.mkdtemp(prefix="tape_jax_compiled_"))
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
