"""LoRA adapters of an engine: where they come from, their content, and which of them are loaded."""
