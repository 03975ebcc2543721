"""Parts that prefill and decode engines share: step times, admission of prompts, KV hand-over."""
