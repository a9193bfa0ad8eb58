"""How the engine runs: slots, lengths, precision and memory."""

from __future__ import annotations

import dataclasses

DTYPES = ("auto", "float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("auto", "xla", "pallas")
QUANTIZATIONS = ("none", "int8")
_SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine, by vLLM's names where vLLM has them."""

    max_model_len: int | None = None  # prompt + output; None: the model's own, or the longest that fits
    max_num_seqs: int = 8  # B: slots, all of which every step computes
    dtype: str = "auto"  # of weights, activations and cache; auto: float32 on CPU, bfloat16 elsewhere
    quantization: str | None = None  # of weights as they are loaded: "int8"; None or "none" keeps them in `dtype`
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9  # the share of the device's memory that may be planned for
    seed: int | None = 0  # of requests without a seed of their own; None: a new one each time
    prefill_chunk_size: int | None = None  # tokens a prefill pass; None: 64 on CPU, 256 elsewhere
    steps_per_dispatch: int | None = (
        None  # speculative steps between two looks of the host; None: 1 on CPU, 8 elsewhere
    )
    implementation: str = "auto"  # of decoding passes; auto: our kernels on one NVIDIA GPU in bfloat16, XLA elsewhere
    smallest_window: int = 256  # attention reads the next power-of-two multiple of it over the longest live sequence

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _SHORT.get(str(self.dtype), str(self.dtype)))
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
        object.__setattr__(self, "quantization", resolve_quantization(self.quantization))
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation={self.implementation!r} is not known; choose one of {', '.join(IMPLEMENTATIONS)}"
            )
        for name in ("max_model_len", "max_num_seqs", "tensor_parallel_size", "prefill_chunk_size",
                     "steps_per_dispatch", "smallest_window"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}; expected a whole number of at least 1")
        if self.max_model_len == 1:
            raise ValueError("max_model_len=1 leaves no room for an output token after a prompt; expected at least 2")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}; expected a share in (0, 1]")


def resolve_quantization(name: str | None, otherwise: str | None = None) -> str | None:
    """What ``name`` asks for: "int8", or None for none; ``otherwise`` where it is None and asks for nothing.

    Raises:
        ValueError: an unknown name.
    """
    if name is None:
        return otherwise
    if name not in QUANTIZATIONS:
        raise ValueError(
            f"quantization={name!r} is not supported; choose 'int8', or 'none' to keep the weights as they are"
        )
    return None if name == "none" else name
