"""The drafting memory: token sequences, searched by suffix, and with which chance they go on."""
