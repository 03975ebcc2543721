"""The store's work on a GPU: clocks, copies, checksums and codecs."""
