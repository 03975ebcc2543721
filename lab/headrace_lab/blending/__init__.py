"""Quality loss of non-prefix reuse, measured with a plain torch model outside of any engine."""
