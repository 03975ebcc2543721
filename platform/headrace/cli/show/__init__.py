"""What a running instance tells, as tables."""
