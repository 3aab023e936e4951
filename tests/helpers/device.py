"""Simulated device whose arrays lie in host memory, with the restrictions of GPU arrays and some additional ones.

The arrays do not convert to NumPy implicitly, do not mix with NumPy arrays and accept only functions of their own
namespace, which rejects arguments that CuPy does not support. Operations that block the host are counted.
"""

import os
import weakref
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from device_emulation import RawKernel, find_compiler
from device_graph import check_not_capturing
from device_runtime import Cuda, CudaDevice, CudaError, Pool

from neondist.backends import Backend, Kernels
from neondist.backends.cupy import CupyKernels
from neondist.backends.cupy_torch import CudaTorchKernels, CupyTorchKernels
from neondist.backends.gpus import find_cupy_problem, load_cupy

ON_GPU = "NEONDIST_GPU" in os.environ
"""whether tests that do not depend on the simulated device run on a GPU: `make test-gpu`"""
_MISSING_FUNCTIONS = {"errstate", "ndindex", "nditer", "put_along_axis"}
"""functions of NumPy that a device does not have"""
_MISSING_ARGUMENTS = {"where", "initial", "order", "subok", "writeable"}
_SYNCHRONISING_FUNCTIONS = {"argwhere", "flatnonzero", "nonzero", "unique"}
"""functions with a result size that depends on values, for which the host waits"""
_ALLOCATING_FUNCTIONS = {"empty", "empty_like"}
"""no kernel is launched"""
_ATTRIBUTES = "flags shape dtype ndim size nbytes itemsize strides"
_METHODS = "all any argmax argsort astype copy fill max mean min ravel reshape sum swapaxes take transpose view"
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_UNARY_AND_COMPARISONS = "neg pos abs invert lt le gt ge eq ne"


class Device:
    """Simulated device that counts its operations.

    Attributes
    ----------
    synchronisations, launches : int
        Number of times the host waited for values, and number of kernel launches.
    used, capacity : int
        Allocated bytes, and the total.
    backend : Backend
        Backend whose kernels take its arrays.

    Parameters
    ----------
    kernels_class : type
        Class of the kernels; without a C compiler the reference kernels are used.
    """

    def __init__(self, capacity=1 << 34, kernels_class=CupyKernels):
        self._synchronisations = self.launches = self.used = 0
        self.capacity, self.capturing = capacity, None
        self.xp = Namespace(self, np)
        self.xp.cuda = Cuda(self)
        self.xp.get_default_memory_pool = Pool
        self.xp.RawKernel = partial(RawKernel, self)
        self.backend = Backend("strict", kernels_class(self.xp) if find_compiler() else Kernels(self.xp))

    @property
    def synchronisations(self):
        """Number of times the host waited for values, which is an error while launches are captured."""
        return self._synchronisations

    @synchronisations.setter
    def synchronisations(self, count):
        if count > self._synchronisations:
            check_not_capturing(self, "D2H")
        self._synchronisations = count

    def wrap(self, value):
        """Return a result as device arrays."""
        if isinstance(value, (np.ndarray, np.generic)):
            return DeviceArray(self, self.allocate(np.asarray(value)))
        return tuple(map(self.wrap, value)) if isinstance(value, (tuple, list)) else value

    def allocate(self, memory):
        """Return the memory of an array, counted as allocated during its lifetime."""
        if memory.base is None:
            if self.used + memory.nbytes > self.capacity:
                raise OutOfMemoryError(memory.nbytes, self.used)
            self.used += memory.nbytes
            weakref.finalize(memory, self._free, memory.nbytes)
        return memory

    def _free(self, nbytes):
        self.used -= nbytes


class OutOfMemoryError(MemoryError):
    """Out-of-memory error with CuPy's message."""

    def __init__(self, size, total):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class Gpu:
    """GPU of this machine, without counts of synchronisations and launches."""

    synchronisations = launches = 0

    def __init__(self, kernels_class):
        self.xp = load_cupy()
        self.backend = Backend("cupy", kernels_class(self.xp))


def select_device(kernels_class=CupyKernels):
    """Return a simulated device with these kernels, or the GPU with NEONDIST_GPU; skip the test if there is no GPU."""
    if not ON_GPU:
        return Device(kernels_class=kernels_class)
    if problem := find_cupy_problem():
        pytest.skip(f"CuPy: {problem}")
    return Gpu(CudaTorchKernels if kernels_class is CupyTorchKernels else kernels_class)


class HostCalls:
    """Device kernels for NumPy arrays, which are copied to the device and back."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return partial(self._call, getattr(self.device.backend.kernels, name))

    def _call(self, kernel, *args):
        result = kernel(*(self.device.xp.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args))
        return tuple(map(self._to_host, result)) if isinstance(result, tuple) else self._to_host(result)

    def _to_host(self, value):
        return self.device.xp.asnumpy(value) if self.device.backend.owns(value) else value


def unwrap(value):
    """Return an argument with the memory of its arrays; TypeError for a host array."""
    if isinstance(value, DeviceArray):
        return value.memory
    if isinstance(value, np.ndarray):
        raise TypeError("expected a device array, got a NumPy array; use xp.asarray")
    return type(value)(map(unwrap, value)) if type(value) in (tuple, list) else value


def call_on_device(device, function, args, kwargs):
    """Call a NumPy function on device memory; TypeError for arguments that CuPy does not support."""
    if unsupported := kwargs.keys() & _MISSING_ARGUMENTS:
        raise TypeError(f"{function.__name__} has no argument {', '.join(unsupported)} on a device")
    device.synchronisations += function.__name__ in _SYNCHRONISING_FUNCTIONS
    if function is np.may_share_memory:  # CuPy crashes on NumPy arrays
        assert all(isinstance(argument, DeviceArray) for argument in args)
    call = function, [unwrap(value) for value in args], {name: unwrap(value) for name, value in kwargs.items()}
    result = call[0](*call[1], **call[2]) if device.capturing is None else device.capturing.record(*call)
    for argument in args:
        if isinstance(argument, DeviceArray) and argument.memory is result:  # returned unchanged, without a copy
            return argument
    launched = "out" in kwargs or getattr(result, "base", result) is None or isinstance(result, np.generic)
    device.launches += launched and function.__name__ not in _ALLOCATING_FUNCTIONS
    return kwargs.get("out", device.wrap(result))


class DeviceArray:
    """Array on a simulated device."""

    __array_ufunc__ = None  # operators with a NumPy array are dispatched to this class
    __hash__ = None

    def __init__(self, device, memory):
        self.device, self.memory = device, memory

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion of a device array to NumPy; use to_host")

    def __array_function__(self, function, types, args, kwargs):
        raise TypeError(f"np.{function.__name__} of a device array; use xp.{function.__name__}")

    def __reduce_ex__(self, protocol):
        raise TypeError("a device array cannot be pickled; use to_host")

    def __array_namespace__(self, api_version=None):
        return self.device.xp

    T = property(lambda self: DeviceArray(self.device, self.memory.T))

    def __len__(self):
        return len(self.memory)

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index):
        index = unwrap(index)
        parts = index if isinstance(index, tuple) else (index,)
        self.device.synchronisations += any(getattr(part, "dtype", np.dtype(int)).kind == "b" for part in parts)
        if isinstance(self.memory[index], np.generic):  # a view, as on a device
            index = (*parts, ...)
        if self.device.capturing is not None:
            return DeviceArray(self.device, self.device.capturing.record(self.memory.__getitem__, [index], {}))
        return DeviceArray(self.device, self.memory[index])

    def __setitem__(self, index, value):
        self.device.launches += 1
        self._write(self.memory.__setitem__, unwrap(index), unwrap(value))

    def _write(self, function, *args):
        """Call a function that writes to the memory, now or at each replay."""
        if self.device.capturing is None:
            return function(*args)
        self.device.capturing.calls.append(lambda: function(*args))
        return self.memory

    @property
    def data(self):
        """Memory, with its address."""
        return SimpleNamespace(ptr=self.memory.__array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self):
        """Array interface by which mpi4py recognises device arrays."""
        return {**self.memory.__array_interface__, "version": 3}

    def __dlpack__(self, **options):
        """Export the array to PyTorch, on the CPU; its launches cannot be captured."""
        assert self.device.capturing is None
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()

    def get(self, stream=None, out=None):
        """Copy the values to host memory in stream order, and wait."""
        stream = stream or self.device.xp.cuda.get_current_stream()
        out = np.empty(self.shape, self.dtype) if out is None else out
        stream.pending.append(partial(np.copyto, out, self.memory))
        stream.synchronize()
        return out

    def set(self, values, stream):
        """Copy host values to this array in stream order; the caller keeps their memory alive."""
        stream.pending.append(partial(self.device.xp.cuda.copy_pinned, self.memory, *self.device.xp.cuda.defer(values)))

    # Operations that block the host.

    def item(self):
        self.device.synchronisations += 1
        return self.memory.item()

    def __bool__(self):
        return bool(self.item())

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __index__(self):
        return int(self.item())


def _make_attribute(name):
    return property(lambda self: getattr(self.memory, name))


def _make_method(name):
    def call(self, *args, **kwargs):
        return call_on_device(self.device, getattr(self.memory, name), args, kwargs)

    return call


def _make_in_place(name):
    def call(self, other):
        self.device.launches += 1
        self.memory = self._write(getattr(self.memory, name), unwrap(other))
        return self

    return call


for _name in _ATTRIBUTES.split():
    setattr(DeviceArray, _name, _make_attribute(_name))
for _name in _METHODS.split():
    setattr(DeviceArray, _name, _make_method(_name))
for _name in _OPERATORS.split():
    setattr(DeviceArray, f"__{_name}__", _make_method(f"__{_name}__"))
    setattr(DeviceArray, f"__r{_name}__", _make_method(f"__r{_name}__"))
    setattr(DeviceArray, f"__i{_name}__", _make_in_place(f"__i{_name}__"))
for _name in _UNARY_AND_COMPARISONS.split():
    setattr(DeviceArray, f"__{_name}__", _make_method(f"__{_name}__"))


class Function(partial):
    """Function of the namespace."""

    @property
    def reduceat(self):
        """Sums of ranges, which CuPy provides for `add`."""
        return partial(self.func, self.args[0].reduceat)


class Namespace:
    """NumPy functions for arrays of a device."""

    ndarray = DeviceArray

    def __init__(self, device, module):
        self._device, self._module = device, module

    def __getattr__(self, name):
        if name in _MISSING_FUNCTIONS:
            raise AttributeError(f"no xp.{name} on a device")
        value = getattr(self._module, name)
        if isinstance(value, ModuleType):
            value = Namespace(self._device, value)
        elif callable(value) and not isinstance(value, type):
            value = Function(self._call, value)
        setattr(self, name, value)
        return value

    def _call(self, function, *args, **kwargs):
        return call_on_device(self._device, function, args, kwargs)

    def asnumpy(self, array):
        """Return a copy on the host, which waits for the device."""
        assert isinstance(array, DeviceArray), f"expected a device array, got {type(array).__name__}"
        self._device.synchronisations += 1
        return array.memory.copy()

    def array(self, values, dtype=None, order="K"):
        """Return a new array of device or host values."""
        capturing = self._device.capturing
        if capturing is not None and isinstance(values, DeviceArray):
            return DeviceArray(self._device, capturing.record(np.array, [values.memory, dtype], {"order": order}))
        check_not_capturing(self._device, "H2D")
        memory = values if isinstance(values, np.ndarray) else unwrap(values)
        return DeviceArray(self._device, self._device.allocate(np.array(memory, dtype, order=order)))

    def from_dlpack(self, tensor):
        """Return an array that shares the memory of a tensor."""
        return DeviceArray(self._device, tensor.numpy())

    def asarray(self, values, dtype=None):
        """Return an array, without a copy if it is one of the device."""
        unchanged = isinstance(values, DeviceArray) and dtype in (None, values.dtype)
        return values if unchanged else self.array(values, dtype)


def make_cupy_module(device, count=1, status=0, driver=13000):
    """Return a module with the functions of a simulated device and the CuPy calls that neondist makes."""

    def count_devices():
        if status:
            raise CudaError(status)
        return count

    module, runtime = ModuleType("cupy"), device.xp.cuda.runtime
    module.__spec__, module.__version__ = ModuleSpec("cupy", None), "14.2.0"
    module.__getattr__ = partial(getattr, device.xp)
    module.cuda = device.xp.cuda
    module.cuda.Device = CudaDevice
    runtime.CUDARuntimeError, runtime.getDeviceCount = CudaError, count_devices
    runtime.runtimeGetVersion, runtime.driverGetVersion = lambda: 12090, lambda: driver
    runtime.getDeviceProperties = lambda number: {"name": b"Strict", "totalGlobalMem": device.capacity}
    return module
