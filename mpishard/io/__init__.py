"""Files that others may have written or may write into: private folders, small JSON files, data sets of HDF5."""
