"""KV cache compression in plain torch: learning its predictor, and measuring its error."""
