"""One speculative step and what it is made of: drafters, sampling, verification, state. It knows ids, not text."""
