"""The data sets that come with neondist.

mnist, idx, download: the official MNIST files. cifar10, cifar10_files: the official binary batches. synthetic: images
of any size, computed on demand. photographs: crops of natural photographs. hdf5, hdf5_source, hdf5_tiles: images of any
size that stay in an HDF5 file. image_files, image_lists, image_crops: crops of images that stay in files of any
supported format. climate_files, field_series: variables of NetCDF and Zarr files over time.
"""
