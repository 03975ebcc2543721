"""Extensions of vLLM's engine.

`extension` defines them. `scheduler` and `worker` have subclasses of vLLM's classes that run them.
"""
