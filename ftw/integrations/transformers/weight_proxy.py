"""WeightProxy: what an embedding of a transformers model shows for its weight while the table is in host memory.

dtype, shape, device, sizes     are told, the device being the model's
weight[id]                      is an unscaled row there
all else                        is refused in one line: as an operand by TypeError, as an attribute by AttributeError
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ftw.errors import printable

if TYPE_CHECKING:
    from ftw.lookup import HostEmbedding

ON_GPU = "load the model with embed='gpu'"


class WeightProxy:
    """Stands for the weight of an embedding whose table is in host memory; it is no tensor, and no operand of one.

    Attributes:
        device: Where the model is, and rows are put.
        dtype: Of the table.
        shape: Of the table, `[rows, columns]`.
        ndim: 2.
        nbytes: Of the table.
        grad: None.
        is_meta: Whether the model is on the meta device.
        is_cuda: Whether it is on a GPU.
    """

    grad = None

    def __init__(self, host: HostEmbedding, device: torch.device) -> None:
        self.device = device
        self.dtype = host.table.dtype
        self.shape = host.table.shape
        self.ndim = host.table.ndim
        self.nbytes = host.table.nbytes
        self.is_meta = device.type == "meta"
        self.is_cuda = device.type == "cuda"
        self._host = host

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        given += [item for several in given if isinstance(several, (list, tuple)) for item in several]  # of torch.cat
        found = (item for item in given if isinstance(item, WeightProxy))
        name = getattr(func, "__name__", str(func))
        raise TypeError(f"{next(found, cls)}, where {name} reads no weight; table is the tensor, or {ON_GPU}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self}, what stands for its weight has no {name!r}; table is the tensor, or {ON_GPU}")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(f"{self}, and stays as it is; {ON_GPU} to change it")

    def __matmul__(self, other: Any) -> NoReturn:
        self.__torch_function__(torch.matmul, (), (self, other))

    __rmatmul__ = __matmul__  # torch takes what its own operator raises for "ask the other side"

    def __str__(self) -> str:
        # Without _host, as where the constructor has failed, __getattr__ would come here again and again.
        host = vars(self).get("_host")
        return f"{printable(host.name) if host is not None else 'table'}: table: is in host memory"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def data(self) -> torch.Tensor:
        """The table, in host memory; what is written there is written for all that share it, and not for hot rows."""
        return self._host.table

    @property
    def requires_grad(self) -> bool:
        """False; nothing else can be set."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> WeightProxy:
        """Take False alone, as a table in host memory is not trained."""
        if requires_grad:
            raise TypeError(f"{self}, and is not trained; {ON_GPU} to train it")
        return self

    def detach(self) -> WeightProxy:
        """Return itself, which no graph of autograd holds."""
        return self

    def dim(self) -> int:
        """Return 2."""
        return self.ndim

    def is_floating_point(self) -> bool:
        """Return that of the table's dtype."""
        return self.dtype.is_floating_point

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the row of an id, looked up on the model's device; of all else a part of the table in host memory."""
        row = index[0] if isinstance(index, tuple) and index[1:] == (slice(None),) else index
        if isinstance(row, int) and 0 <= row < self.shape[0]:
            rows: torch.Tensor = self._host(torch.full((1,), row, device=self.device))
            return rows[0]
        return self._host.table[index]
