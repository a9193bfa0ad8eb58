"""Measurements: ``python -m pard_jax.bench generate``. Every figure that README and docs give is printed by one."""
