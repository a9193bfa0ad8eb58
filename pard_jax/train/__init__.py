"""Training a PARD draft: data, COD packing, the loss, the loop, and what comes out of it."""
