"""What the store does on a GPU: the time of its work, copies, checksums and codecs there."""
