"""Files that other users or processes may have written: private folders, small JSON files, HDF5 data sets.

Input: paths and bytes that another user or program may have written.
Output: checked values, files that are whole or absent, and messages.

Read ``files`` first, then ``hdf5``; ``log`` has the messages of all rooms, ``terminal`` is how a line gets out.
"""
