"""What prefill and decode engines share: measuring steps, letting prompts in, handing KV over."""
