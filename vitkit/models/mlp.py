"""The MLP of Qwen2.5-VL at a width that the matrix units like: zeros appended, gate and up in one product.

The published width, 3420, is no multiple of 8: rows of 6840 bytes are not aligned to 16, and cuBLAS falls back to an
old kernel. Padded to 3424 the extra columns are silu(0) * 0 = 0 and meet zeros again on the way down, so the result is
the same sum. The parameters become views of the padded storage: no weight is held twice, and whoever reads or writes
a parameter in place reads or writes what is multiplied.
"""

import torch
import torch.nn.functional as F

from .graphs import wait_once

MULTIPLE = 8  # entries: 16 bytes of a 16-bit type


class Padded:
    """The padded weights of one MLP with gate_proj, up_proj and down_proj; its parameters are views of them.

    gate_up: (2P, C) and its bias (2P) or None: rows of gate, zeros, rows of up, zeros; down: (C, P).
    """

    def __init__(self, mlp):
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        width, columns = gate.weight.shape
        self.width = -(-width // MULTIPLE) * MULTIPLE
        with torch.inference_mode(False), torch.no_grad():  # a training step may follow
            self.gate_up = gate.weight.new_zeros(2 * self.width, columns)
            self.down = down.weight.new_zeros(down.weight.shape[0], self.width)
            self.bias = None if gate.bias is None else gate.bias.new_zeros(2 * self.width)
            # every parameter: its layer and name, the storage it becomes a view of, and its place there
            first, second = slice(0, width), slice(self.width, self.width + width)
            places = [(gate, "weight", "gate_up", first), (up, "weight", "gate_up", second)]
            if self.bias is not None:
                places += [(gate, "bias", "bias", first), (up, "bias", "bias", second)]
            places.append((down, "weight", "down", (slice(None), slice(0, width))))
            self.views = []
            for layer, name, storage, place in places:
                whole = getattr(self, storage)
                view, parameter = whole[place], getattr(layer, name)
                view.copy_(parameter)
                parameter.data = view
                self.views.append((layer, name, storage, view.data_ptr() - whole.data_ptr()))
        wait_once(self.down.device)

    def whole(self) -> bool:
        """Whether the parameters still lie here: `.to()`, and loading by assignment, give them other memory."""
        return all(
            layer._parameters.get(name) is not None
            and layer._parameters[name].data_ptr() == getattr(self, storage).data_ptr() + offset
            for layer, name, storage, offset in self.views
        )

    def release(self):
        """Gives every parameter memory of its own again."""
        with torch.inference_mode(False), torch.no_grad():
            for layer, name, _, _ in self.views:
                parameter = layer._parameters.get(name)
                if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

    def hidden(self, x):
        """(N, C) -> (N, 2P): what gate and up make of x, side by side."""
        return F.linear(x, self.gate_up, self.bias)


def serves(mlp) -> bool:
    """Whether it is a gated MLP of three plain linear layers of one dtype."""
    layers = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(layer) is torch.nn.Linear and "weight" in layer._parameters for layer in layers):
        return False
    biases = {layers[0].bias is None, layers[1].bias is None}
    return len(biases) == 1 and layers[0].weight.dtype == layers[1].weight.dtype == layers[2].weight.dtype
