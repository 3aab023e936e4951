"""A strict device: arrays in NumPy's memory that behave as a GPU's would, and stricter.

They never become NumPy arrays by themselves, do not mix with them, and are touched by no NumPy function, only by those
of their namespace, which takes no argument that CuPy's functions do not have. What makes the host wait is counted.
"""

import os
import weakref
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from device_graph import not_now
from device_runtime import Cuda, CudaDevice, CudaError, Pool
from device_twin import RawKernel, compiler

from neondist.backends import Backend, Kernels
from neondist.backends.cupy import CupyKernels
from neondist.backends.cupy_torch import CudaTorchKernels, CupyTorchKernels
from neondist.backends.gpus import find_problem, load

ON_GPU = "NEONDIST_GPU" in os.environ
"""whether tests that need no strict device run on a GPU: `make test-gpu`"""
_LACKING = {"errstate", "ndindex", "nditer", "put_along_axis"}
"""what NumPy has, and no device"""
_LACKING_ARGUMENTS = {"where", "initial", "order", "subok", "writeable"}
_WAITING = {"argwhere", "flatnonzero", "nonzero", "unique"}
"""the host has to know how large their results are"""
_MEMORY = {"empty", "empty_like"}
"""is there without a kernel"""
_ATTRIBUTES = "flags shape dtype ndim size nbytes itemsize strides"
_METHODS = "all any argmax argsort astype copy fill max mean min ravel reshape sum swapaxes take transpose view"
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHER_OPERATORS = "neg pos abs invert lt le gt ge eq ne"


class Device:
    """A device, and what has been asked of it.

    Attributes
    ----------
    synchronisations, launches : int
        How often the host waited for values, and how many kernels were started.
    used, most : int
        Bytes of its arrays, and how many there can be.
    backend : Backend
        Kernels over its arrays.

    Parameters
    ----------
    table : type
        Of the kernels; without a C compiler they are the reference's.
    """

    def __init__(self, most=1 << 34, table=CupyKernels):
        self._synchronisations = self.launches = self.used = 0
        self.most, self.capturing = most, None
        self.xp = Namespace(self, np)
        self.xp.cuda = Cuda(self)
        self.xp.get_default_memory_pool = Pool
        self.xp.RawKernel = partial(RawKernel, self)
        self.backend = Backend("strict", table(self.xp) if compiler() else Kernels(self.xp))

    @property
    def synchronisations(self):
        """How often the host waited for values; never while launches are captured."""
        return self._synchronisations

    @synchronisations.setter
    def synchronisations(self, count):
        if count > self._synchronisations:
            not_now(self, "D2H")
        self._synchronisations = count

    def wrapped(self, value):
        """Return a result as the device's."""
        if isinstance(value, (np.ndarray, np.generic)):
            return DeviceArray(self, self.allocated(np.asarray(value)))
        return tuple(map(self.wrapped, value)) if isinstance(value, (tuple, list)) else value

    def allocated(self, memory):
        """Return an array's memory, which counts as the device's as long as it is there."""
        if memory.base is None:
            if self.used + memory.nbytes > self.most:
                raise OutOfMemoryError(memory.nbytes, self.used)
            self.used += memory.nbytes
            weakref.finalize(memory, self._free, memory.nbytes)
        return memory

    def _free(self, nbytes):
        self.used -= nbytes


class OutOfMemoryError(MemoryError):
    """CuPy's, in its words."""

    def __init__(self, size, total):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class Gpu:
    """The GPU of this machine, whose waits and launches nobody counts."""

    synchronisations = launches = 0

    def __init__(self, table):
        self.xp = load()
        self.backend = Backend("cupy", table(self.xp))


def device_under_test(table=CupyKernels):
    """Return a strict device with these kernels; with NEONDIST_GPU set the GPU, or skip the test."""
    if not ON_GPU:
        return Device(table=table)
    if problem := find_problem():
        pytest.skip(f"CuPy: {problem}")
    return Gpu(CudaTorchKernels if table is CupyTorchKernels else table)


class HostCalls:
    """A device's kernels for callers that have NumPy's arrays, which go there and come back."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return partial(self._call, getattr(self.device.backend.kernels, name))

    def _call(self, kernel, *args):
        found = kernel(*(self.device.xp.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args))
        return tuple(map(self._back, found)) if isinstance(found, tuple) else self._back(found)

    def _back(self, value):
        return self.device.xp.asnumpy(value) if self.device.backend.owns(value) else value


def inner(value):
    """Return the memory of the arrays in an argument; TypeError for one of the host's."""
    if isinstance(value, DeviceArray):
        return value.inner
    if isinstance(value, np.ndarray):
        raise TypeError("a NumPy array among the device's: bring it there by xp.asarray")
    return type(value)(map(inner, value)) if type(value) in (tuple, list) else value


def run(device, function, args, kwargs):
    """Call a function of NumPy's on the device's memory; TypeError for arguments that a device's do not have."""
    if lacking := kwargs.keys() & _LACKING_ARGUMENTS:
        raise TypeError(f"{function.__name__} has no argument {', '.join(lacking)} on a device")
    device.synchronisations += function.__name__ in _WAITING
    if function is np.may_share_memory:  # CuPy's ends the process
        assert all(isinstance(argument, DeviceArray) for argument in args)
    call = function, [inner(value) for value in args], {name: inner(value) for name, value in kwargs.items()}
    found = call[0](*call[1], **call[2]) if device.capturing is None else device.capturing.called(*call)
    for argument in args:
        if isinstance(argument, DeviceArray) and argument.inner is found:  # it was as it should be
            return argument
    made = "out" in kwargs or getattr(found, "base", found) is None or isinstance(found, np.generic)
    device.launches += made and function.__name__ not in _MEMORY
    return kwargs.get("out", device.wrapped(found))


class DeviceArray:
    """An array of a device."""

    __array_ufunc__ = None  # an operator between a NumPy array and this one is this one's
    __hash__ = None

    def __init__(self, device, memory):
        self.device, self.inner = device, memory

    def __array__(self, *args, **kwargs):
        raise TypeError("a device's array does not become NumPy's by itself: call to_host")

    def __array_function__(self, function, types, args, kwargs):
        raise TypeError(f"np.{function.__name__} of a device's array: take it from xp")

    def __reduce_ex__(self, protocol):
        raise TypeError("a device's array travels by no pickle: call to_host")

    def __array_namespace__(self, api_version=None):
        return self.device.xp

    T = property(lambda self: DeviceArray(self.device, self.inner.T))

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return (self[at] for at in range(len(self)))

    def __getitem__(self, index):
        index = inner(index)
        chosen = index if isinstance(index, tuple) else (index,)
        self.device.synchronisations += any(getattr(part, "dtype", np.dtype(int)).kind == "b" for part in chosen)
        if isinstance(self.inner[index], np.generic):  # a view, as of a device
            index = (*chosen, ...)
        if self.device.capturing is not None:
            return DeviceArray(self.device, self.device.capturing.called(self.inner.__getitem__, [index], {}))
        return DeviceArray(self.device, self.inner[index])

    def __setitem__(self, index, value):
        self.device.launches += 1
        self._change(self.inner.__setitem__, inner(index), inner(value))

    def _change(self, function, *args):
        """Let a function change the memory, now or whenever it is replayed."""
        if self.device.capturing is None:
            return function(*args)
        self.device.capturing.each.append(lambda: function(*args))
        return self.inner

    @property
    def data(self):
        """Its memory, by address."""
        return SimpleNamespace(ptr=self.inner.__array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self):
        """The same, and more, by which mpi4py knows a device's array."""
        return {**self.inner.__array_interface__, "version": 3}

    def __dlpack__(self, **how):
        """Give it to PyTorch, which has it on the CPU, and whose launches nobody captures."""
        assert self.device.capturing is None
        return self.inner.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def get(self, stream=None, out=None):
        """Copy the values into memory of the host, once the stream is as far, and wait for it."""
        stream = stream or self.device.xp.cuda.get_current_stream()
        out = np.empty(self.shape, self.dtype) if out is None else out
        stream.pending.append(partial(np.copyto, out, self.inner))
        stream.synchronize()
        return out

    def set(self, values, stream):
        """Copy values of the host here, when the stream is as far; it does not keep them until then."""
        stream.pending.append(partial(self.device.xp.cuda.copy_pinned, self.inner, *self.device.xp.cuda.pinned(values)))

    # What makes the host wait.

    def item(self):
        self.device.synchronisations += 1
        return self.inner.item()

    def __bool__(self):
        return bool(self.item())

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __index__(self):
        return int(self.item())


def _attribute(name):
    return property(lambda self: getattr(self.inner, name))


def _method(name):
    def call(self, *args, **kwargs):
        return run(self.device, getattr(self.inner, name), args, kwargs)

    return call


def _in_place(name):
    def call(self, other):
        self.device.launches += 1
        self.inner = self._change(getattr(self.inner, name), inner(other))
        return self

    return call


for _name in _ATTRIBUTES.split():
    setattr(DeviceArray, _name, _attribute(_name))
for _name in _METHODS.split():
    setattr(DeviceArray, _name, _method(_name))
for _name in _OPERATORS.split():
    setattr(DeviceArray, f"__{_name}__", _method(f"__{_name}__"))
    setattr(DeviceArray, f"__r{_name}__", _method(f"__r{_name}__"))
    setattr(DeviceArray, f"__i{_name}__", _in_place(f"__i{_name}__"))
for _name in _OTHER_OPERATORS.split():
    setattr(DeviceArray, f"__{_name}__", _method(f"__{_name}__"))


class Function(partial):
    """A function of the namespace."""

    @property
    def reduceat(self):
        """Sums of ranges, which CuPy has for `add`."""
        return partial(self.func, self.args[0].reduceat)


class Namespace:
    """NumPy's functions, for the arrays of a device."""

    ndarray = DeviceArray

    def __init__(self, device, module):
        self._device, self._module = device, module

    def __getattr__(self, name):
        if name in _LACKING:
            raise AttributeError(f"no xp.{name} on a device")
        found = getattr(self._module, name)
        if isinstance(found, ModuleType):
            found = Namespace(self._device, found)
        elif callable(found) and not isinstance(found, type):
            found = Function(self._call, found)
        setattr(self, name, found)
        return found

    def _call(self, function, *args, **kwargs):
        return run(self._device, function, args, kwargs)

    def asnumpy(self, array):
        """Return a copy on the host, which waits for it."""
        assert isinstance(array, DeviceArray), f"{type(array).__name__} is not the device's"
        self._device.synchronisations += 1
        return array.inner.copy()

    def array(self, values, dtype=None, order="K"):
        """Return a new array, also of the host's values."""
        capturing = self._device.capturing
        if capturing is not None and isinstance(values, DeviceArray):
            return DeviceArray(self._device, capturing.called(np.array, [values.inner, dtype], {"order": order}))
        not_now(self._device, "H2D")
        memory = values if isinstance(values, np.ndarray) else inner(values)
        return DeviceArray(self._device, self._device.allocated(np.array(memory, dtype, order=order)))

    def from_dlpack(self, tensor):
        """Return an array over a tensor's memory."""
        return DeviceArray(self._device, tensor.numpy())

    def asarray(self, values, dtype=None):
        """Return an array; one of the device's stays what it is."""
        same = isinstance(values, DeviceArray) and dtype in (None, values.dtype)
        return values if same else self.array(values, dtype)


def cupy_like(device, count=1, status=0, driver=13000):
    """Return a module with the functions of a strict device, and the calls of CuPy to GPUs that neondist makes."""

    def devices():
        if status:
            raise CudaError(status)
        return count

    module, runtime = ModuleType("cupy"), device.xp.cuda.runtime
    module.__spec__, module.__version__ = ModuleSpec("cupy", None), "14.2.0"
    module.__getattr__ = partial(getattr, device.xp)
    module.cuda = device.xp.cuda
    module.cuda.Device = CudaDevice
    runtime.CUDARuntimeError, runtime.getDeviceCount = CudaError, devices
    runtime.runtimeGetVersion, runtime.driverGetVersion = lambda: 12090, lambda: driver
    runtime.getDeviceProperties = lambda number: {"name": b"Strict", "totalGlobalMem": device.most}
    return module
