"""Files: written whole or not at all, and not believed before they are looked at.

files: text and folders. hdf5: HDF5 files with checksums of ours. checkpoint: whole arrays that any number of ranks
writes and reads. output: the folder of a run; lock: one run at a time in it; environment: what it ran on.
"""
