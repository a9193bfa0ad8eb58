"""The demo pair, a small target and its PARD draft trained from scratch, and what makes its data and tokenizer."""
