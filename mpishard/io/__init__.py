"""Files that other users or processes may have written: private folders, small JSON files, HDF5 data sets."""
