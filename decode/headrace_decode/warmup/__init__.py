"""Work before the first client: measuring remote prefill, and computing prompts in advance."""
