"""``python -m pard_jax.synthesize``: a target model writes the conversations that its draft is trained on."""
