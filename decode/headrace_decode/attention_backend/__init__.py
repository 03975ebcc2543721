"""The extension of engines with sparse, offloaded and compressed requests, and vLLM's attention
backends in which their rows attend. No other folder imports more than one technique.
"""
