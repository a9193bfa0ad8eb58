"""Requests in slots: admission, prefill, stop conditions, text, acceptance metrics. The only room with a host loop."""
