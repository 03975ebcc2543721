"""KV cache compression in plain torch: its predictor is learned, and its error measured."""
