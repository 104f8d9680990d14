"""Collection: what nobody needs is removed, facts before bytes, leaves before parents, and nothing that is still
needed.

The order of a run, each step of which may be the last one before a crash, and is then simply taken again:

1. the lock (`lock.py`): one collection at a time; every write of a run is conditional on it;
2. marking (`marking.py`, pure): over one snapshot of chunks, uses and pins, with the cut-off read before;
3. facts (`facts.py`): the marked chunks, deepest first, each in a transaction conditional on everything it was marked
by;
4. orphans (`orphans.py`): objects in the bucket that no fact names and no garbage record lists get one;
5. bytes (`objects.py`): objects whose grace period is over;
6. directories (`directories.py`): replica facts of chunk directories that no worker claims any more;
7. decisions (`decisions.py`): batches past their retention.
"""
