"""What happens to a prefix tier in the test against its model, and how often."""

import hypothesis.strategies as st
from test_against_model import PROMPTS, ROWS, SALTS, STEP
from tier_model import FAULTS

FAULT = st.sampled_from([None] * 18 + [(fault, at) for fault in FAULTS for at in range(3)])
COUNT, NTH, WHETHER = st.integers(1, 4), st.integers(0, 1), st.booleans()
# To run and whether to publish: in steps that leave snapshots and holes, or in one.
STEPS = st.lists(
    st.tuples(st.sampled_from([2, 2, 4, 4, 3, STEP]), st.sampled_from([True, True, False])),
    min_size=3,
    max_size=6,
)
NUMBER = st.integers(0, 99)
KNOWN = st.one_of(NUMBER, NUMBER, PROMPTS)  # which of those served before goes on, or a prompt
ENDS = st.sampled_from([True, True, True, False])


DRAWN = {  # {method: (odds, arguments)}
    "request": (8, st.integers(0, ROWS - 1), KNOWN, SALTS, STEPS, ENDS),
    "all_away": (2,),
    "begin": (2, KNOWN, SALTS),
    "receive": (3, NTH, WHETHER),
    "finish": (1, NTH),
    "send": (1, WHETHER),
    "lose_on_host": (1, st.integers(0, 2), COUNT),
    "lose_in_store": (1, NUMBER),
    "save_all": (1,),
}


def call(name):
    """What fails in it, if anything, the method's name, its arguments."""
    return st.tuples(FAULT, st.just(name), st.tuples(*DRAWN[name][1:]))


ACTIONS = st.sampled_from([name for name, (odds, *_) in DRAWN.items() for _ in range(odds)])
