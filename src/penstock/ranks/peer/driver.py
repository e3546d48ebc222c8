"""The calls of the CUDA driver that peer memory needs and torch does not offer.

Memory that another process of this machine can map, and waits and signals in a stream that take
no multiprocessor: the device itself compares a number in memory before it starts what follows.

Addresses, streams and contexts are plain integers. The calls belong to the current device of the
calling thread, so make the right one current before. A thread that has not used the device yet has
no context at all, even for the first device.
"""

import ctypes
from functools import cache

__all__ = [
    "DriverError",
    "allocate",
    "copy",
    "create_stream",
    "current_context",
    "export_memory",
    "fill",
    "free",
    "is_stream_idle",
    "map_memory",
    "pin_host_memory",
    "unmap_memory",
    "unpin_host_memory",
    "use_context",
    "wait_for_value",
    "write_value",
]

HANDLE_BYTES = 64
# Let the device of the mapping process reach memory of another device, where it can.
_ENABLE_PEER_ACCESS = 1
# Make pinned memory known to every context and give it an address on the device.
_PORTABLE_AND_MAPPED = 3
# Neither waits for the default stream nor holds it up; ahead of compute, as messages are.
_NON_BLOCKING, _FIRST = 1, -1
_NOT_READY = 600
# Continue as soon as the number in memory is at least the given one, by cyclic comparison.
_AT_LEAST = 0

_Address = ctypes.c_uint64
_Stream = ctypes.c_void_p


class DriverError(RuntimeError):
    """A call of the CUDA driver failed, or there is no driver."""


class _Handle(ctypes.Structure):
    """The name by which another process maps memory, passed by value."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


_ARGUMENTS = {
    "cuCtxGetCurrent": [ctypes.POINTER(ctypes.c_void_p)],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuMemAlloc_v2": [ctypes.POINTER(_Address), ctypes.c_size_t],
    "cuMemFree_v2": [_Address],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _Address],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_Address), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_Address],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(_Address), ctypes.c_void_p, ctypes.c_uint],
    "cuStreamCreateWithPriority": [ctypes.POINTER(_Stream), ctypes.c_uint, ctypes.c_int],
    "cuStreamQuery": [_Stream],
    "cuMemcpyAsync": [_Address, _Address, ctypes.c_size_t, _Stream],
    "cuMemsetD8Async": [_Address, ctypes.c_ubyte, ctypes.c_size_t, _Stream],
    "cuStreamWaitValue32_v2": [_Stream, _Address, ctypes.c_uint32, ctypes.c_uint],
    "cuStreamWriteValue32_v2": [_Stream, _Address, ctypes.c_uint32, ctypes.c_uint],
}


@cache
def _load() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _ARGUMENTS.items():
            getattr(driver, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise DriverError(f"the CUDA driver cannot be used: {error}") from error
    return driver


def _require(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _load().cuGetErrorName(code, ctypes.byref(name))
        text = "unknown" if name.value is None else name.value.decode()
        raise DriverError(f"the CUDA driver could not {what}: {text} ({code})")


def current_context() -> int:
    """Return the context of the device that this thread uses."""
    context = ctypes.c_void_p()
    _require(_load().cuCtxGetCurrent(ctypes.byref(context)), "find the context of this thread")
    return context.value or 0


def use_context(context: int) -> None:
    """Let this thread use the context of another one."""
    _require(_load().cuCtxSetCurrent(context), "use the context of a device")


def allocate(size: int) -> int:
    """Return the address of new device memory, which torch's allocator does not know of."""
    address = _Address()
    _require(_load().cuMemAlloc_v2(ctypes.byref(address), size), f"allocate {size:,} bytes")
    return address.value


def free(address: int) -> None:
    """Free what `allocate` returned; it waits for the device."""
    _require(_load().cuMemFree_v2(address), "free memory")


def export_memory(address: int) -> bytes:
    """Return the handle by which other processes of this machine can map allocated memory."""
    handle = _Handle()
    _require(_load().cuIpcGetMemHandle(ctypes.byref(handle), address), "export memory")
    return bytes(handle.data)


def map_memory(handle: bytes) -> int:
    """Return an address at which this process can use memory that another one has exported."""
    if len(handle) != HANDLE_BYTES:
        raise DriverError(f"a memory handle must have {HANDLE_BYTES} bytes (got {len(handle)})")
    address, named = _Address(), _Handle.from_buffer_copy(handle)
    code = _load().cuIpcOpenMemHandle_v2(ctypes.byref(address), named, _ENABLE_PEER_ACCESS)
    _require(code, "map the memory of another process")
    return address.value


def unmap_memory(address: int) -> None:
    """End a mapping; it waits for the device."""
    _require(_load().cuIpcCloseMemHandle(address), "unmap the memory of another process")


def pin_host_memory(address: int, size: int) -> int:
    """Pin host memory and return its address on the device."""
    driver, on_device = _load(), _Address()
    code = driver.cuMemHostRegister_v2(address, size, _PORTABLE_AND_MAPPED)
    _require(code, "pin shared memory of the host")
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_device), address, 0)
    _require(code, "reach shared memory of the host")
    return on_device.value


def unpin_host_memory(address: int) -> None:
    """Undo `pin_host_memory`; it waits for the device."""
    _require(_load().cuMemHostUnregister(address), "unpin shared memory of the host")


def create_stream() -> int:
    """Return a new stream, which shares its place in line with no other."""
    stream = _Stream()
    code = _load().cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, _FIRST)
    _require(code, "create a stream")
    return stream.value or 0


def is_stream_idle(stream: int) -> bool:
    """Return whether everything in a stream is done."""
    code: int = _load().cuStreamQuery(stream)
    if code not in (0, _NOT_READY):
        _require(code, "look at a stream")
    return code == 0


def fill(address: int, byte: int, size: int, stream: int) -> None:
    """Fill memory with a byte, after what is in the stream."""
    _require(_load().cuMemsetD8Async(address, byte, size, stream), f"fill {size:,} bytes")


def copy(target: int, source: int, size: int, stream: int) -> None:
    """Copy between any two addresses, after what is in the stream."""
    code = _load().cuMemcpyAsync(target, source, size, stream)
    if code:
        _require(code, f"copy {size:,} bytes")


def wait_for_value(stream: int, address: int, value: int) -> None:
    """Let a stream wait until the number at an address has reached this value."""
    code = _load().cuStreamWaitValue32_v2(stream, address, value & 0xFFFFFFFF, _AT_LEAST)
    if code:
        _require(code, "wait in a stream")


def write_value(stream: int, address: int, value: int) -> None:
    """Write a number after what is in the stream, when others can see all of that."""
    code = _load().cuStreamWriteValue32_v2(stream, address, value & 0xFFFFFFFF, 0)
    if code:
        _require(code, "signal in a stream")
