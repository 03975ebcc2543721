"""vLLM's attention backends, and the worker classes, in which sparse, offloaded and compressed rows
attend. The only folder that imports more than one technique.
"""
