"""What the machine allows, measured in the same run as the ops: a copy of the same bytes, a launch of nothing, and a
large matrix product.

A limit stands among a case's calls and is called with the op's inputs, but it computes something else: it brings its
own buffers, its own `check` and its own count of bytes.
"""

from functools import partial
from importlib.util import find_spec

import torch

# From so many bytes read and written on the driver of an H200 copies 1.5 times more slowly a byte, in however many
# pieces (2.74 TB/s), while an elementwise kernel keeps the speed that both have below (4.0 to 4.2 TB/s).
DRIVER_COPY_BYTES = 2**29


class Limit:
    """Callable with an op's inputs; `check(outputs)` says whether the last call did what it should."""

    bytes = 0


class CopyLimit(Limit):
    """The limit of a memory-bound op that moves `n_bytes` in all: half of them read, and written into as many more.

    Like an op it allocates its outputs in every call. On the CPU there are `parts` of them (2 for q and k), from where
    those of the numba rotary come from: on huge pages if they are large, without which page faults cost more than the
    copy. On a GPU there is one, since a second would be another launch: it is the driver's copy, and from
    DRIVER_COPY_BYTES on torch's elementwise kernel that reads and writes as much, bitwise_not. It takes the next of its
    `n_sets` sources at every call: give it as many as the case has sets of inputs, so that it meets the cache as cold
    as the ops do.
    """

    def __init__(self, n_bytes: int, n_sets: int, device, parts: int = 1):
        if n_bytes < 8 or n_sets < 1:
            raise ValueError(f"n_bytes={n_bytes}, n_sets={n_sets}: at least 8 bytes and one set are allowed")
        on_cpu = torch.device(device).type == "cpu"
        parts = parts if on_cpu else 1
        words = max(1, n_bytes // 8 // parts)  # int32: on a CPU torch copies single bytes more slowly
        self.bytes, self.next, self.empty_like = 8 * words * parts, 0, torch.empty_like
        self.inverted = not on_cpu and self.bytes >= DRIVER_COPY_BYTES
        if on_cpu and find_spec("numba"):
            from vitkit.rotary.numba_kernels import empty_like

            self.empty_like = empty_like
        make = partial(torch.randint, 2**31 - 1, (words,), dtype=torch.int32, device=device)
        self.sources = [[make() for _ in range(parts)] for _ in range(n_sets)]

    def __call__(self, *_):
        sources = self.sources[self.next]
        self.next = (self.next + 1) % len(self.sources)
        if self.inverted:
            return [torch.bitwise_not(x) for x in sources]
        return [self.empty_like(x).copy_(x) for x in sources]  # contiguous, one dtype: the driver's own copy on a GPU

    def check(self, copied) -> bool:
        """Whether the last call copied what it should, or its complement."""
        sources = self.sources[self.next - 1]
        return all(map(torch.equal, copied, map(torch.bitwise_not, sources) if self.inverted else sources))


class EmptyLaunch(Limit):
    """The limit of host time on a GPU: the launch of a Triton kernel of one program that does nothing."""

    def __init__(self, device):
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device={str(device)!r}: only a GPU is allowed, elsewhere nothing is launched")
        import triton

        @triton.jit
        def _empty_kernel(x_ptr):
            pass

        self.kernel, self.x = _empty_kernel, torch.zeros(1, device=self.device)

    def __call__(self, *_):
        if self.device.index in (None, torch.cuda.current_device()):
            self.kernel[(1,)](self.x)
        else:
            with torch.cuda.device(self.device):
                self.kernel[(1,)](self.x)

    def check(self, _) -> bool:
        """It ran; there is nothing else to compare."""
        return True


class Matmul(Limit):
    """The limit of arithmetic: the product of two n x n matrices of normal random numbers in `dtype`.

    flop: floating-point operations of a call, 2 n^3. Large enough to fill the device: 8192 on a GPU, 1024 on a CPU.
    """

    def __init__(self, n: int, dtype, device):
        if n < 1 or not dtype.is_floating_point:
            raise ValueError(f"n={n}, dtype={dtype}: at least 1 and a floating-point dtype are allowed")
        self.flop = 2 * n**3
        generator = torch.Generator(device).manual_seed(0)
        self.a, self.b = (torch.randn(n, n, generator=generator, dtype=dtype, device=device) for _ in range(2))

    def __call__(self, *_):
        return self.a @ self.b

    def check(self, product):
        """Whether the first rows are those of the product in float64, up to the rounding of `dtype`, and by how much
        they differ: arithmetic of less precision, such as TF32, would be another limit."""
        exact = self.a[:4].double() @ self.b.double()
        error = float((product[:4].double() - exact).norm() / exact.norm())
        return error <= max(torch.finfo(product.dtype).eps, 2e-6), f"error {error:.2g}"
