"""Drafters behind one protocol: PARD, a sequential draft model, n-gram look-up, none."""

from pard_jax.decoding.drafters.ngram import NgramDrafter
from pard_jax.decoding.drafters.none import NoDrafter
from pard_jax.decoding.drafters.pard import PardDrafter
from pard_jax.decoding.drafters.protocol import DraftContext, Drafter, Proposal
from pard_jax.decoding.drafters.sequential import SequentialDrafter

__all__ = ["DraftContext", "Drafter", "NgramDrafter", "NoDrafter", "PardDrafter", "Proposal", "SequentialDrafter"]
