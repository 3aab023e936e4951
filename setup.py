import sys
import sysconfig

from setuptools import Extension, setup

# one build for all later versions of Python: the stable ABI has included buffers since 3.11
stable = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")

names = ["cells_typed", "depthwise", "depthwise_typed", "pool", "pool_typed", "rows", "rows_typed"]
headers = [f"_{name}" for name in (*names, "winograd", "winograd_sizes", "winograd_typed")]

setup(
    ext_modules=[
        Extension(
            "neondist.backends._cells",
            ["neondist/backends/_cells.c"],
            depends=[f"neondist/backends/{name}.h" for name in headers],
            extra_compile_args=["-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"],
            define_macros=[("Py_LIMITED_API", "0x030b0000")] if stable else [],
            py_limited_api=stable,
            optional=True,  # without a compiler, slower kernels of NumPy or PyTorch are used
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
)
