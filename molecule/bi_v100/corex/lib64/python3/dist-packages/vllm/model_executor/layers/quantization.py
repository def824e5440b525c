"""The quantization methods of the engine."""

QUANTIZATION_METHODS = ("awq", "gptq", "w8a16")
