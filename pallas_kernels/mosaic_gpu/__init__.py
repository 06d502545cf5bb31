"""The kernels for Hopper GPUs and later ones.

Blocks move in pieces: a bulk copy brings a piece into a ring in shared memory, another one takes
it out, and several are in flight. The grid is persistent: as many programs as the device holds,
each with every so-manieth item of the work. Words whose places no bulk copy can take, since they
do not begin or end at 16 bytes, go through registers.
"""
