"""Defines two operators of torchvision, whose own library does not fit a CPU build of torch.

SGLang imports torchvision, which registers fake versions of them and needs their schemas. They are
defined when torchvision is looked for first; before that nothing imports torch.
"""

from __future__ import annotations

import sys
from types import ModuleType


class _BeforeTorchvision:
    library: object = None

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        type(self).library = library  # its definitions last as long as it


sys.meta_path.insert(0, _BeforeTorchvision())
