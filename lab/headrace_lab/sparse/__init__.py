"""Quality loss of sparse attention, measured with a plain torch model outside of any engine."""
