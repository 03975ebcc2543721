"""Search for runs of a prompt's tokens in stored texts, at any position in both."""
