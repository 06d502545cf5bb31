"""The parts of the prefix cache; `kvpool.prefix_cache` puts them together.

keys.py       what identifies tokens            places.py    what is kept for a unit of them
tree.py       the prompts that are cached       growth.py    what a row adds to it
match.py      the longest hit                   pending.py   hits that rows are about to allow
holdings.py   the blocks held, and who goes     needs.py     how many have to
eviction.py   in which order                    snapshots.py where rows should stop
publish.py    what is done to the state         audit.py     whether all of it is right
lasting.py    what is told to stay              cap.py       at how many lengths a path may be hit
making_room.py  evicting until enough is free   stats.py     what is counted
"""
