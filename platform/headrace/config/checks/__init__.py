"""The checks of a configuration's values.

`configuration` calls all of them. `engine_args` checks vLLM's arguments. `conflicts` compares
values that both the file and `build_app` may hold. `messages` has the words.
"""
