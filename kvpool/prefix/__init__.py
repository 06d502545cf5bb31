"""The parts of the prefix cache; `kvpool.prefix_cache` puts them together.

keys.py: what identifies tokens. places.py: what is kept for a unit of them. tree.py: the prompts
that are cached. match.py: the longest hit. publish.py: what is read from and done to the state.
"""
