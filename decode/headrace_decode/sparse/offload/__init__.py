"""Pages of offloaded requests: which of them are in the engine's memory, and how rows attend to
them."""
