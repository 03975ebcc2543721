"""What sparse attention costs in quality, measured with a plain torch model beside any engine."""
