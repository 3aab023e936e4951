"""File input and output: files are written atomically, and verified before they are used.

files: text and folders. hdf5: HDF5 files with checksums. checkpoint: global arrays, written and read by any number of
ranks. output: run folders; lock: exclusive access to them; environment: versions, hosts and threads of a run.
"""
