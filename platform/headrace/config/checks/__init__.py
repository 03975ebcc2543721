"""The checks of a configuration's values.

`configuration` calls all of them, and those of `config.conflicts`. `engine_args` checks vLLM's
arguments. `messages` has the words.
"""
