"""CUDA C++ compiled at first use by NVRTC, which comes with torch, and launched by the driver.

No nvcc, no headers, no C++ extension: a kernel is ready in about a second.
"""

import ctypes
import ctypes.util
import importlib.util
from functools import cache
from pathlib import Path

import torch

from shadowkv_lab.errors import CannotRun

HERE = Path(__file__).parent
PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def library() -> ctypes.CDLL:
    """NVRTC itself; raises `CannotRun` where it is missing."""
    spec = importlib.util.find_spec("nvidia")
    found = [
        str(path)
        for folder in (spec.submodule_search_locations if spec else [])
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))
        if ".alt." not in path.name
    ]
    found += [name] if (name := ctypes.util.find_library("nvrtc")) else []
    for name in found:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CannotRun("NVRTC is missing", remedy="pip install nvidia-cuda-nvrtc, or a CUDA toolkit")


@cache
def compiled(source: str, arch: str, *options: str) -> bytes:
    """A .cu file of this folder as machine code for `arch` ("sm_90"); no GPU needed."""
    nvrtc, program = library(), ctypes.c_void_p()
    text = (HERE / source).read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None)
    flags = [f"--gpu-architecture={arch}", "--std=c++17", *options]
    listed = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), listed)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CannotRun(f"{source} does not compile for {arch}: {log.value.decode()[-2000:]}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


class Kernel:
    """A kernel of one .cu file on one device, with the dynamic shared memory that it names."""

    def __init__(self, source: str, name: str, device: torch.device, *options: str):
        major, minor = torch.cuda.get_device_capability(device)
        # Hopper's own instructions (wgmma) need the "a" target.
        code = compiled(source, f"sm_{major}{minor}{'a' if major == 9 else ''}", *options)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream(device).synchronize()  # a context, and the device's own
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            self._do("cuModuleLoadData", ctypes.byref(self.module), code)
            self._do("cuModuleGetFunction", ctypes.byref(self.function), self.module, name.encode())
            address, size = ctypes.c_void_p(), ctypes.c_size_t()
            self._do(
                "cuModuleGetGlobal_v2",
                ctypes.byref(address),
                ctypes.byref(size),
                self.module,
                b"shared_bytes",
            )
            shared = ctypes.c_int()
            self._do("cuMemcpyDtoH_v2", ctypes.byref(shared), address, ctypes.c_size_t(4))
            self.shared = shared.value
            self._do("cuFuncSetAttribute", self.function, MAX_SHARED, shared)

    def _do(self, call: str, *arguments: object) -> None:
        if error := getattr(self.cuda, call)(*arguments):
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(error, ctypes.byref(text))
            reason = (text.value or b"?").decode()
            raise CannotRun(f"CUDA driver, {call}: {reason}", remedy="See shadowkv doctor")

    def launch(self, grid: tuple[int, int], threads: int, *arguments: object) -> None:
        """On torch's current stream; arguments are tensors, ints (32 bits) and floats (float32).

        The launch is programmatic: the kernel itself waits for the one before it.
        """
        values = [
            ctypes.c_void_p(a.data_ptr())
            if isinstance(a, torch.Tensor)
            else ctypes.c_float(a)
            if isinstance(a, float)
            else ctypes.c_int(a)
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attribute = _Attribute(PDL, 0, (ctypes.c_int * 16)(1))
        config = _Config(
            (ctypes.c_uint * 3)(*grid, 1),
            (ctypes.c_uint * 3)(threads, 1, 1),
            self.shared,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            1,
        )
        self._do("cuLaunchKernelEx", ctypes.byref(config), self.function, pointers, None)
